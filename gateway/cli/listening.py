"""The address a command listens on, and what is said if it cannot be had."""

from __future__ import annotations

import errno
import socket


class CannotListen(Exception):
    """The message says which address, why, and what to do."""


def listen(host: str, port: int, choose: str = "--port") -> socket.socket:
    """A socket that listens there; port 0 takes a free one. ``choose`` is how the user names another port.

    It listens at once, not when the server has started: Linux lets two sockets with ``SO_REUSEADDR`` have one port as
    long as neither does. Raises ``CannotListen``.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        listener.close()
        raise CannotListen(told(error, host, port, choose)) from None
    return listener


def told(error: OSError | OverflowError, host: str, port: int, choose: str = "--port") -> str:
    """Why nothing can listen there, and what to do."""
    another = f"Choose another one with {choose}; 0 takes a free one"
    what = {
        errno.EADDRINUSE: f"another program has port {port}.\n  {another}.",
        errno.EACCES: f"not everybody may take port {port}.\n  {another}, above 1023.",
        errno.EADDRNOTAVAIL: f"this machine has no address {host}; see --host.",
    }
    why = what.get(error.errno or 0) if isinstance(error, OSError) else f"ports are 0 to 65535.\n  {another}."
    if isinstance(error, socket.gaierror):
        why = f"there is no host {host} here; see --host."
    return f"cannot listen on {host}:{port}: {why or error}"


def url_of(host: str, port: int) -> str:
    """The base URL of who listens there."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
