"""The ``kvgate`` command: one file a subcommand, imported only when it is called, so that ``--help`` is instant."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from gateway import __version__

COMMANDS: dict[str, str] = {
    "serve": "run the gateway in front of vLLM servers",
    "demo": "run the gateway in front of two simulated vLLM servers, or of yours, and try one request",
    "simulate": "run a simulated vLLM server",
    "status": "show backends, windows and KV caches of a running gateway",
    "count": "count the prompt tokens of a request file",
    "explain": "say what the gateway would do with a request file: count, windows, trimming",
    "config": "check and print the settings",
    "plan": "what fits on a card: window, concurrency, KV cache and the vllm serve command",
    "doctor": "say why a vLLM server did not start, or check a running one",
    "gpus": "show the GPUs here: memory, processes, temperature",
    "client-config": "print the settings a coding agent needs to know the true window",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status. 2 for wrong usage, 130 for Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="kvgate", description="A gateway for vLLM that knows every context window and KV cache behind it."
    )
    parser.add_argument("--version", action="version", version=f"kvgate {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    for name, summary in COMMANDS.items():
        command = subparsers.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name == chosen:
            importlib.import_module(f"gateway.cli.{name.replace('-', '_')}").configure(command)
    options = parser.parse_args(arguments)
    try:
        status = int(options.run(options))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Who reads the output has had enough (``| head``). Python flushes once more at exit and must not fail then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
