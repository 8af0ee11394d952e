"""A command of ours that runs beside another one as a process of its own, such as the parts of ``kvgate demo``."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
from types import TracebackType
from typing import IO, Self

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0


class PartFailed(RuntimeError):
    """It did not start, or ended by itself."""


class Part:
    """``kvgate`` with ``flags``, which says in a line where it listens, and is ended with the ``with`` block. Whatever
    else it says goes to our stderr.

    It is known by its own word to be there: an answer from an address may be another program's.
    """

    def __init__(self, name: str, flags: list[str]) -> None:
        self._name = name
        # Its own session: Ctrl-C goes to us alone, and we end the parts in order.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gateway", *flags],
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._url: str | None = None
        self._told = threading.Event()
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(timeout=STOP_TIMEOUT_S)
        if self._process.stdout is not None and not self._reader.is_alive():
            self._process.stdout.close()

    def url(self) -> str:
        """Where it listens, once it does. Raises ``PartFailed``."""
        self._told.wait(timeout=START_TIMEOUT_S)
        if self._url is None:
            self.check()
            raise PartFailed(f"{self._name} did not start within {START_TIMEOUT_S:.0f} s")
        return self._url

    def check(self) -> None:
        """Raises ``PartFailed`` if it has ended."""
        status = self._process.poll()
        if status is not None:
            raise PartFailed(f"{self._name} ended with status {status}; its message stands above")

    def wait(self) -> int:
        """Wait until it ends by itself. Its exit status."""
        return self._process.wait()

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            found = None if self._url is not None else re.search(r" on (http://\S+)", line)
            if found is not None:
                self._url = found[1]
                self._told.set()
            else:
                sys.stderr.write(line)
                sys.stderr.flush()
        # The end of its words is the end of it; its status is there in a moment.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=STOP_TIMEOUT_S)
        self._told.set()
