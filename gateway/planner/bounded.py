"""Ask a server that may answer anything: each request has one deadline for the whole of it and a bound on its size."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

MOST_BYTES = 64 << 20


class Unanswered(Exception):
    """Why there is no answer, as the end of a sentence about the server."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A status and a whole body."""

    status_code: int
    content: bytes

    @property
    def text(self) -> str:
        return self.content.decode("utf-8", "replace")

    def json(self) -> Any:
        """The parsed body; None where it is not JSON."""
        try:
            return json.loads(self.content)
        except (ValueError, RecursionError):
            return None


class Asker:
    """GET and POST below ``base``, each within ``timeout_s``. Raises Unanswered for whatever a server does."""

    def __init__(
        self,
        base: str,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float,
        most_bytes: int = MOST_BYTES,
        follow_redirects: bool = False,
    ) -> None:
        import httpx2

        self._base, self._timeout_s, self._most_bytes = base, timeout_s, most_bytes
        self._client = httpx2.Client(
            headers=dict(headers or {}), timeout=timeout_s, follow_redirects=follow_redirects, max_redirects=5
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def get(self, path: str) -> Answer:
        return self._ask("GET", path, None)

    def post(self, path: str, body: object) -> Answer:
        return self._ask("POST", path, body)

    def _ask(self, method: str, path: str, body: object) -> Answer:
        import httpx2

        deadline_s = time.monotonic() + self._timeout_s
        received = bytearray()
        try:
            with self._client.stream(method, self._base + path, json=body) as response:
                for piece in response.iter_bytes():
                    received += piece
                    if len(received) > self._most_bytes:
                        raise Unanswered(f"sends more than {self._most_bytes >> 20} MiB for {path}")
                    if time.monotonic() > deadline_s:
                        raise Unanswered(f"has not finished {path} within {self._timeout_s:g} s")
                return Answer(response.status_code, bytes(received))
        except (httpx2.UnsupportedProtocol, httpx2.InvalidURL, UnicodeError) as error:
            raise Unanswered("is no URL a request can go to; write http://HOST:PORT") from error
        except httpx2.HTTPError as error:
            raise Unanswered(f"does not answer ({type(error).__name__})") from error
