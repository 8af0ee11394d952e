"""``kvgate count``: the prompt tokens of a request file, as vLLM will count them; or an audit against a backend."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.cli.served import TIMEOUT_S, BadInput, served

if TYPE_CHECKING:
    from gateway.tokens.service import Counter, ServedModel
    from gateway.types import Ask, Count

# One render a message: beyond this the shares are left out.
MOST_MESSAGES_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Share:
    """What one message adds to the prompt when it follows those before it."""

    role: str
    tokens: int


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("file", metavar="FILE", help="body of a request as JSON, or - for stdin")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="folder or hub id of the tokenizer and chat template")
    parser.add_argument("--backend", metavar="URL", help="vLLM server to take the model from, and to ask if need be")
    parser.add_argument("--path", help="path the request is sent to (default: guessed from the body)")
    parser.add_argument(
        "--audit",
        action="store_true",
        help="FILE has a request a line: send each to the backend for one token and compare",
    )
    parser.add_argument("--gateway", action="store_true", help="with --audit: URL is a kvgate's")
    parser.add_argument("--api-key", metavar="KEY", help="with --audit: sent as a bearer token")
    parser.add_argument("--model", help="served name at the backend (default: the request's, or its only one)")
    parser.add_argument("--chat-template", type=Path, metavar="FILE", help="as the server's --chat-template")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the count. 2 for a file that is no request, 1 if the backend cannot be reached or an audit finds fault."""
    from gateway.exceptions import BackendFailed, BadRequest

    try:
        _check(options)
        if options.audit:
            from gateway.cli import count_audit

            return count_audit.run(options, read_file(options.file))
        ask = _ask(read_file(options.file), options.path)
        count, shares, reason = asyncio.run(_count(ask, options))
    except (BadInput, BadRequest) as error:
        print(f"kvgate: {error}", file=sys.stderr)
        return 2
    except BackendFailed as error:
        print(f"kvgate: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(_document(count, shares, reason), indent=2))
    else:
        _print(count, shares, reason)
    return 0


def read_file(name: str) -> bytes:
    """The bytes of a file, or of stdin for ``-``. Raises ``BadInput``."""
    try:
        return sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise BadInput(f"cannot read {name}: {error.strerror or error}") from None


def _check(options: argparse.Namespace) -> None:
    if options.audit and (options.backend is None or options.path is not None):
        raise BadInput("--audit needs --backend, and finds each request's path in its line")
    if (options.gateway or options.api_key) and not options.audit:
        raise BadInput("--gateway and --api-key go with --audit")
    if not options.audit and (options.tokenizer is None) == (options.backend is None):
        raise BadInput("say either --tokenizer or --backend")


def _ask(body: bytes, path: str | None) -> Ask:
    """The request, of the path it is most likely sent to. Raises ``BadInput`` or ``BadRequest``."""
    from gateway.api.parsers import COUNTED, guessed_path
    from gateway.api.paths import normalise

    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"the file is not JSON: {error}") from None
    if not isinstance(document, dict) or guessed_path(document) is None:
        raise BadInput("the file must hold a JSON object with `messages` (chat), `prompt` (completions) or `input`")
    path = guessed_path(document) if path is None else normalise(path)
    if path not in COUNTED:
        raise BadInput(f"requests to {path} are not counted")
    if not document.get("model"):
        # The gateway needs a model to choose a backend; for counting any name does.
        body = json.dumps({**document, "model": "model"}).encode()
    return COUNTED[path](body, "application/json", path)


async def _count(ask: Ask, options: argparse.Namespace) -> tuple[Count, list[Share], str]:
    import httpx2

    from gateway.config import CountingSettings, ModelSettings
    from gateway.tokens.service import Counter, ServedModel

    if options.chat_template is not None and not options.chat_template.is_file():
        raise BadInput(f"cannot read {options.chat_template}: no such file")
    async with httpx2.AsyncClient(trust_env=False, timeout=TIMEOUT_S) as client:

        async def post(url: str, body: Any, headers: Mapping[str, str], timeout_s: float) -> tuple[int, dict[str, Any]]:
            response = await client.post(url, json=body, headers=dict(headers), timeout=timeout_s)
            return response.status_code, response.json()

        if options.backend:
            model = await served(options.backend, options.model or ask.model, options.model is not None)
        else:
            model = ServedModel(options.model or ask.model, options.tokenizer)
        override = ModelSettings(chat_template=options.chat_template)
        counter = Counter(CountingSettings(backend_timeout_s=TIMEOUT_S), {model.name: override}, post)
        try:
            await counter.warm(model)
            count = await counter.count(ask, model)
            view = counter.describe(model.name)
            reason = view.reason if view is not None else ""
            if options.tokenizer and counter.local(model) is None:
                raise BadInput(reason)
            return count, _shares(counter, model, ask) if count.source == "local" else [], reason
        finally:
            counter.close()


def _shares(counter: Counter, model: ServedModel, ask: Ask) -> list[Share]:
    """Tokens that each message adds; none if the template refuses a part of the conversation."""
    from dataclasses import replace

    from gateway.tokens.errors import CannotCount
    from gateway.types import ChatPrompt

    local, prompt = counter.local(model), ask.prompt
    if local is None or not isinstance(prompt, ChatPrompt) or len(prompt.messages) > MOST_MESSAGES_SHOWN:
        return []
    shares: list[Share] = []
    before = 0
    for number, message in enumerate(prompt.messages, start=1):
        part = replace(
            prompt,
            messages=prompt.messages[:number],
            add_generation_prompt=False,
            continue_final_message=False,
        )
        try:
            (tokens,) = local.count(part, {})
        except CannotCount:
            return []
        shares.append(Share(str(message.get("role")), tokens - before))
        before = tokens
    return shares


def _document(count: Count, shares: list[Share], reason: str) -> dict[str, Any]:
    document: dict[str, Any] = {
        "tokens": count.tokens,
        "total_tokens": count.total_tokens,
        "kind": count.kind.value,
        "source": count.source,
    }
    if reason:
        document["reason"] = reason
    if shares:
        document["messages"] = [{"role": share.role, "tokens": share.tokens} for share in shares]
    return document


def _print(count: Count, shares: list[Share], reason: str) -> None:
    print(f"{count.tokens} prompt tokens ({count.kind.value}, source {count.source})")
    if count.total_tokens != count.tokens:
        print(f"{count.total_tokens} over all prompts of the request")
    if reason:
        print(f"not counted by a better source: {reason}")
    for number, share in enumerate(shares, start=1):
        print(f"{number:>5}  {share.role:<10} {share.tokens:>8}")
    rest = count.tokens - sum(share.tokens for share in shares)
    if shares and rest:
        print(f"{'':>5}  {'(rest)':<10} {rest:>8}")
