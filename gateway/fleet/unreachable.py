"""Why no connection to a backend comes about, and what its operator should look at. Pure."""

from __future__ import annotations

import errno
import socket
import ssl
from dataclasses import dataclass

# What to look at, for failures that say nothing of it themselves.
HOST = "Check the host: no such name is known here."
LISTENS = "Is vLLM running there? It listens only once its model is loaded. Else check the host and the port."
NETWORK = "Check the host, and the network between."
SCHEME = "Check whether its URL should begin with http:// or https://, and the server's certificate."
SILENT = "A wrong address, a firewall between, or a server that hangs?"
SERVER = "Check that this is the base URL of a vLLM server."

_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.EADDRNOTAVAIL)


@dataclass(frozen=True, slots=True)
class Cause:
    """In a few words; what to check; whether a server that is not there yet would look the same; and whether one would
    that is cut off while its requests run (one that ends refuses, and may yet answer who is with it)."""

    words: str
    check: str
    may_come: bool = True
    silent: bool = False


def cause_of(error: BaseException) -> Cause:
    """What lies under an error of connecting. HTTP clients wrap it, and their own words say little."""
    for each in _chain(error):
        if isinstance(each, ssl.SSLError):
            said = getattr(each, "verify_message", None) or getattr(each, "reason", None) or each
            return Cause(f"TLS failed, {str(said).replace('_', ' ').lower()}", SCHEME, may_come=False)
        if isinstance(each, socket.gaierror):
            return Cause(f"host not found, {each.strerror}", HOST, silent=True)
        if isinstance(each, ConnectionRefusedError):
            return Cause("connection refused", LISTENS)
        if isinstance(each, OSError) and each.errno in _UNREACHABLE:
            return Cause((each.strerror or "unreachable").lower(), NETWORK, silent=True)
    return Cause(str(error) or type(error).__name__, LISTENS)


def _chain(error: BaseException) -> list[BaseException]:
    """The error and those it came from, the outermost first."""
    seen: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop(0)
        if each is None or any(each is known for known in seen):
            continue
        seen.append(each)
        if isinstance(each, BaseExceptionGroup):
            waiting += each.exceptions
        waiting += [each.__cause__, each.__context__]
    return seen
