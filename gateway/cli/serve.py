"""``kvgate serve``: the gateway, until it is told to stop."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading

from gateway.cli import settings as flags
from gateway.cli.listening import CannotListen, listen, url_of


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    flags.add_flags(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM. 2 for wrong settings or an address that cannot be had."""
    from gateway.configuring import ConfigError

    try:
        settings = flags.read(options)
        if not settings.backends:
            raise ConfigError("no backend: give --backend http://host:8000, or set backends in kvgate.yaml")
    except ConfigError as error:
        print(f"kvgate: {error}", file=sys.stderr)
        return 2

    from gateway import __version__
    from gateway.app import create_app
    from gateway.observe import logs
    from gateway.server import Server

    logs.configure(settings.log_level)
    sys.setswitchinterval(0.001)  # a long template rendered in a thread must not hold up the streams of others
    try:
        listener = listen(settings.host, settings.port)
    except CannotListen as error:
        print(f"kvgate: {error}", file=sys.stderr)
        return 2
    url = url_of(settings.host, listener.getsockname()[1])
    print(f"kvgate {__version__} listening on {url}", file=sys.stderr, flush=True)
    server = Server(create_app(settings), settings)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # before the server listens to them, and after
    with listener:
        server.run(sockets=[listener])
    status = 0 if server.started else 1
    if any(thread.daemon for thread in threading.enumerate()):
        # A tokenizer is still being loaded, in native code: to end the interpreter under it would abort the process.
        logging.shutdown()
        sys.stderr.flush()
        os._exit(status)
    return status
