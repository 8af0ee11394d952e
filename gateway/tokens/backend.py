"""Counting by asking a vLLM server's ``/tokenize``, with the request's knobs that it ignores passed in other ways.

vLLM 0.32's ``/tokenize`` renders the same template as the chat endpoint, but does not know ``reasoning_effort`` and
``documents`` (given as template kwargs here) and does not rename ``reasoning_content``. It applies no length limit, and
its processor expands images.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from gateway.tokens.errors import CannotCount
from gateway.tokens.local import template_variables
from gateway.types import ChatPrompt, TextPrompts

Post = Callable[[str, Any, Mapping[str, str], float], Awaitable[tuple[int, Mapping[str, Any]]]]
"""Async JSON POST: url, body, headers, timeout in seconds to status and document. May raise anything."""

# Each text of a list is a request of its own here; more than this are estimated.
MAX_TEXTS = 32
_TRIES = 2
_TOOLS_SINCE = (0, 10)


async def count_at_backend(
    post: Post,
    prompt: ChatPrompt | TextPrompts,
    model: str,
    backends: tuple[str, ...],
    api_keys: Mapping[str, str],
    vllm_version: str | None,
    timeout_s: float,
) -> tuple[int, ...]:
    """Tokens of each prompt for the engine, as one of ``backends`` counts them. Raises ``CannotCount``."""
    if not backends:
        raise CannotCount("no backend is up that could be asked")
    if isinstance(prompt, ChatPrompt):
        bodies = [_chat_body(prompt, model, vllm_version)]
    elif len(prompt.texts) <= MAX_TEXTS:
        bodies = [
            {"model": model, "prompt": text, "add_special_tokens": prompt.add_special_tokens} for text in prompt.texts
        ]
    else:
        raise CannotCount(f"more than {MAX_TEXTS} texts are not sent to a backend for counting")
    reason = CannotCount("no backend was asked")
    try:
        async with asyncio.timeout(timeout_s):
            for url in backends[:_TRIES]:
                try:
                    return tuple([await _ask(post, url, body, api_keys.get(url), timeout_s) for body in bodies])
                except CannotCount as error:
                    reason = error
                    if error.refused:
                        break
    except TimeoutError:
        raise CannotCount(f"/tokenize did not answer within {timeout_s:g} s") from None
    raise reason


async def _ask(post: Post, url: str, body: Mapping[str, Any], key: str | None, timeout_s: float) -> int:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        status, document = await post(f"{url}/tokenize", body, headers, timeout_s)
    except Exception as error:  # whatever the client raises: this source has no answer
        raise CannotCount(f"{url}/tokenize failed: {error or type(error).__name__}") from None
    count = document.get("count")
    if status == 200 and isinstance(count, int) and not isinstance(count, bool) and count >= 0:
        return count
    raise CannotCount(f"{url}/tokenize answered {status}", refused=status == 400)


def _chat_body(prompt: ChatPrompt, model: str, vllm_version: str | None) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "messages": [_with_reasoning(message) for message in prompt.messages],
        "add_generation_prompt": prompt.add_generation_prompt,
        "continue_final_message": prompt.continue_final_message,
        "add_special_tokens": prompt.add_special_tokens,
    }
    variables = template_variables(prompt, {})
    for known in ("add_generation_prompt", "continue_final_message", "chat_template", "tokenize"):
        variables.pop(known, None)
    if variables:
        body["chat_template_kwargs"] = variables
    if prompt.tools is not None:
        version = _version(vllm_version)
        if version is not None and version < _TOOLS_SINCE:
            raise CannotCount(f"/tokenize of vLLM {vllm_version} takes no tools")
        body["tools"] = prompt.tools
    return body


def _with_reasoning(message: Any) -> Any:
    """Reasoning under the name that chats are renamed to, and under the one older servers read."""
    if not isinstance(message, Mapping):
        return message
    reasoning = message.get("reasoning", message.get("reasoning_content"))
    return message if reasoning is None else {**message, "reasoning": reasoning, "reasoning_content": reasoning}


def _version(text: str | None) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", text or "")
    return (int(found[1]), int(found[2])) if found else None
