"""``kvgate explain``: what the gateway would do with a request file, and why."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gateway.explaining import Explanation

# Lines of messages beyond which the middle ones are left out.
MOST_LINES = 60
WIDTH = 60


class BadInput(Exception):
    """What was asked for cannot be done; the message says why."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("file", metavar="FILE", help="body of a request as JSON, or - for stdin")
    parser.add_argument("--backend", action="append", metavar="URL", help="vLLM server that would serve it; repeat")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="without a backend: tokenizer and chat template")
    parser.add_argument("--window", type=int, metavar="TOKENS", help="without a backend: window of the model")
    parser.add_argument("--path", help="path the request is sent to (default: guessed from the body)")
    parser.add_argument("--model", help="served name (default: the request's, or the backend's only one)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings file (default: kvgate.yaml, if any)")
    parser.add_argument("--body", metavar="FILE", help="write the body that would be sent; - prints only that")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the explanation. 2 for wrong usage or a file that is no request, 1 if a backend cannot be reached."""
    from gateway.configuring import ConfigError, load
    from gateway.exceptions import BackendFailed, BadRequest
    from gateway.explaining import CannotExplain, explain

    try:
        if bool(options.backend) == bool(options.tokenizer):
            raise BadInput("give --backend URL, or --tokenizer FOLDER with --window TOKENS")
        if options.tokenizer and not options.window:
            raise BadInput("--tokenizer needs --window TOKENS, too")
        if options.backend and options.window:
            raise BadInput("--window is for --tokenizer; backends say theirs")
        body = _read(options.file)
        path = options.path or guessed_path(body)
        explanation = asyncio.run(
            explain(
                body,
                path,
                load(options.config),
                backends=tuple(options.backend or ()),
                tokenizer=options.tokenizer,
                window_tokens=options.window,
                model=options.model,
            )
        )
    except (BadInput, BadRequest, ConfigError, CannotExplain) as error:
        print(f"kvgate: {error}", file=sys.stderr)
        return 2
    except BackendFailed as error:
        print(f"kvgate: {error}", file=sys.stderr)
        return 1
    if options.body == "-":
        sys.stdout.buffer.write(explanation.body + b"\n")
        return 0
    if options.body:
        try:
            Path(options.body).write_bytes(explanation.body)
        except OSError as error:
            print(f"kvgate: cannot write {options.body}: {error.strerror or error}", file=sys.stderr)
            return 1
    print(json.dumps(_document(explanation), indent=2) if options.json else "\n".join(lines(explanation)))
    return 0


def _read(name: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise BadInput(f"cannot read {name}: {error.strerror or error}") from None


def guessed_path(body: bytes) -> str:
    """The path that a body of this shape is meant for. Raises ``BadInput``."""
    from gateway.api import parsers

    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"the file is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise BadInput("the file must hold a JSON object")
    path = parsers.guessed_path(document)
    if path is None:
        raise BadInput("the file has none of `messages`, `input` and `prompt`; say --path if it is a request")
    return path


def _document(explanation: Explanation) -> dict[str, Any]:
    document = asdict(explanation)
    document["body_bytes"] = len(document.pop("body"))
    return document


def lines(explanation: Explanation) -> list[str]:
    """The explanation for people, in lines of at most 60 columns where names are short."""
    said = [f"{explanation.path}, model {explanation.model}"]
    if explanation.repairs:
        said.append(f"repaired first: {', '.join(explanation.repairs)}")
    count = f"{explanation.prompt_tokens} prompt tokens"
    said += ["", f"{count} ({explanation.count_kind}, source {explanation.count_source})"]
    said += _shortened([f"{one.number:>5}  {one.role:<10} {one.tokens:>9}" for one in explanation.messages])
    if explanation.messages:
        said.append(f"{'':>5}  {'(rest)':<10} {explanation.rest_tokens:>9}")
    said += ["", f"{'backend':<21} {'window':>8}  verdict"]
    said += [f"{window.backend:<21} {window.window_tokens:>8}  {window.verdict}" for window in explanation.windows]
    said += ["", *(row for sentence in explanation.verdict for row in _wrapped(sentence, ""))]
    if explanation.edits:
        said += ["", *(row for edit in explanation.edits for row in _wrapped(edit, "  "))]
    said += [
        "",
        f"to be sent: {len(explanation.body)} bytes (--body - prints them)" if explanation.body else "not sent",
    ]
    return said


def _wrapped(text: str, indent: str) -> list[str]:
    blank = text[: len(text) - len(text.lstrip())] + indent
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=blank + "  ")


def _shortened(rows: list[str]) -> list[str]:
    if len(rows) <= MOST_LINES:
        return rows
    half = MOST_LINES // 2
    return [*rows[:half], f"{'':>5}  ({len(rows) - 2 * half} more; --json has all)", *rows[-half:]]
