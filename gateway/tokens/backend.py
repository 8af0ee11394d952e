"""Counting by asking vLLM: its render endpoints, ``/v1/messages/count_tokens`` and ``/tokenize``.

Rendering (``--enable-scale-out``, or ``vllm launch render`` beside the backends) and ``count_tokens`` run the code that
serves the request, so they are exact; both apply the window. ``/tokenize`` applies none. In vLLM 0.32 it renders the
same template as the chat endpoint, but does not know ``reasoning_effort`` and ``documents`` (given as template kwargs
here), does not rename ``reasoning_content``, and takes no conversation of Anthropic's.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from gateway.tokens.errors import CannotCount
from gateway.tokens.local import template_variables
from gateway.tokens.render_bodies import RENDER, count_tokens_body, render_body
from gateway.types import Ask, ChatPrompt, Dialect, TextPrompts

Post = Callable[[str, Any, Mapping[str, str], float], Awaitable[tuple[int, Mapping[str, Any]]]]
"""Async JSON POST: url, body, headers, timeout in seconds to status and document. May raise anything."""

# Each text of a list is a request of its own here; more than this are estimated.
MAX_TEXTS = 32
_TRIES = 2
_TOOLS_SINCE = (0, 10)

# An endpoint that is not there, or switched off, is not asked again before so long: the server may be another by then.
RETRY_AFTER_S = 600.0
_ABSENT = frozenset({403, 404, 405, 501})

# vLLM's words, of whatever version, for a prompt beyond the window.
_TOO_LONG = re.compile(
    r"maximum context length|context length is only|max_model_len|maximum model length|at least 1, got"
)


class Backends:
    """Asks backends to count, source by source, and remembers which of them lack an endpoint."""

    def __init__(self, post: Post, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._post = post
        self._timeout_s = timeout_s
        self._clock = clock
        self._absent: dict[tuple[str, str], float] = {}

    def lacks(self, url: str, path: str) -> bool:
        """Whether the endpoint was found absent, lately."""
        since = self._absent.get((url, path))
        return since is not None and self._clock() - since < RETRY_AFTER_S

    async def count(
        self,
        source: str,
        prompt: ChatPrompt | TextPrompts,
        ask: Ask | None,
        model: str,
        urls: tuple[str, ...],
        api_keys: Mapping[str, str],
        vllm_version: str | None,
    ) -> tuple[int, ...]:
        """Tokens of each prompt for the engine, as ``source`` counts them. Raises ``CannotCount``.

        ``urls`` are asked in turn, two at most. ``ask`` is the request that the prompt is of, if there is one.
        """
        requests = list(_requests(source, prompt, ask, model, vllm_version))
        if not urls:
            raise CannotCount("no backend is up that could be asked")
        path = requests[0][0]
        present = [url for url in urls if not self.lacks(url, path)]
        if not present:
            raise CannotCount(f"no backend has {path}")
        reason = CannotCount("no backend was asked")
        try:
            async with asyncio.timeout(self._timeout_s):
                for url in present[:_TRIES]:
                    try:
                        return tuple([await self._ask(url, *request, api_keys.get(url)) for request in requests])
                    except CannotCount as error:
                        reason = error
                        if error.refused:
                            break
        except TimeoutError:
            raise CannotCount(f"{path} did not answer within {self._timeout_s:g} s") from None
        raise reason

    async def _ask(self, url: str, path: str, body: Mapping[str, Any], key: str | None) -> int:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        try:
            status, document = await self._post(f"{url}{path}", body, headers, self._timeout_s)
        except Exception as error:  # whatever the client raises: this source has no answer
            raise CannotCount(f"{url}{path} failed: {str(error) or type(error).__name__}") from None
        count = _count_in(path, document)
        if status == 200 and count is not None:
            return count
        if status in _ABSENT and not _is_unknown_model(document):
            self._absent[url, path] = self._clock()
        too_long = status == 400 and path != "/tokenize" and _TOO_LONG.search(str(document)) is not None
        if too_long:
            raise CannotCount(f"{url}{path} refuses what is beyond the window")
        raise CannotCount(f"{url}{path} answered {status}", refused=status == 400)


def _requests(
    source: str, prompt: ChatPrompt | TextPrompts, ask: Ask | None, model: str, vllm_version: str | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Path and body of each request that ``source`` takes. Raises ``CannotCount`` where it takes none."""
    dialect = ask.dialect if ask is not None else Dialect.CHAT
    if source == "render":
        if not isinstance(prompt, ChatPrompt) or dialect not in RENDER:
            raise CannotCount("only chats are rendered")
        yield RENDER[dialect], render_body(prompt, ask, model)
    elif source == "count_tokens":
        if ask is None or dialect is not Dialect.MESSAGES:
            raise CannotCount("only Anthropic's requests are counted there")
        yield "/v1/messages/count_tokens", count_tokens_body(ask, model)
    elif isinstance(prompt, ChatPrompt):
        yield "/tokenize", _chat_body(prompt, model, vllm_version)
    elif len(prompt.texts) <= MAX_TEXTS:
        for text in prompt.texts:
            yield "/tokenize", {"model": model, "prompt": text, "add_special_tokens": prompt.add_special_tokens}
    else:
        raise CannotCount(f"more than {MAX_TEXTS} texts are not sent to a backend for counting")


def _count_in(path: str, document: Mapping[str, Any]) -> int | None:
    """The number in the endpoint's answer."""
    if path.endswith("/render"):
        ids = document.get("token_ids")
        return len(ids) if isinstance(ids, list) else None
    count = document.get("count" if path == "/tokenize" else "input_tokens")
    return count if isinstance(count, int) and not isinstance(count, bool) and count >= 0 else None


def _is_unknown_model(document: Mapping[str, Any]) -> bool:
    """Whether a 404 is about the model's name, not about the path."""
    error = document.get("error")
    return isinstance(error, Mapping) and "does not exist" in str(error.get("message"))


def _chat_body(prompt: ChatPrompt, model: str, vllm_version: str | None) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "messages": [_with_reasoning(message) for message in prompt.messages],
        "add_generation_prompt": prompt.add_generation_prompt,
        "continue_final_message": prompt.continue_final_message,
        "add_special_tokens": prompt.add_special_tokens,
    }
    if prompt.chat_template is not None:
        body["chat_template"] = prompt.chat_template
    variables = template_variables(prompt, {})
    for known in ("add_generation_prompt", "continue_final_message", "chat_template", "tokenize"):
        variables.pop(known, None)
    if variables:
        body["chat_template_kwargs"] = variables
    if prompt.mm_processor_kwargs:
        body["mm_processor_kwargs"] = prompt.mm_processor_kwargs
    if prompt.media_io_kwargs:
        body["media_io_kwargs"] = prompt.media_io_kwargs
    if prompt.tools:
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
