"""API keys: a client shows one as a bearer token (OpenAI) or in ``x-api-key`` (Anthropic)."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from pydantic import SecretStr

from gateway.exceptions import Unauthorized


class Keys:
    """The keys that open the gateway, or a part of it; with none, every caller is let in. ``setting`` names them."""

    def __init__(self, keys: Iterable[SecretStr], setting: str = "api_keys") -> None:
        self._setting = setting
        self._keys = tuple(key.get_secret_value().encode() for key in keys)

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raise ``Unauthorized`` unless one of our keys is among ``headers`` (ASGI: lower-case names)."""
        if not self._keys:
            return
        shown = shown_key(headers).encode("utf-8", "surrogateescape")
        if not sum(hmac.compare_digest(shown, key) for key in self._keys):  # all are compared: timing tells nothing
            raise Unauthorized(
                "Missing API key: send it as `Authorization: Bearer KEY`."
                if not shown
                else f"Unknown API key: it is none of the gateway's {self._setting}."
            )


def shown_key(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The key among ``headers``, empty if there is none; a bearer token goes before ``x-api-key``."""
    shown = b""
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            shown = value[7:].strip()
            break
        if name == b"x-api-key":
            shown = value.strip()
    return shown.decode("utf-8", "surrogateescape")
