"""What is sent to vLLM's render and count endpoints: the client's own request, less what only serving it needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.types import Ask, ChatPrompt, Dialect

RENDER = {
    Dialect.CHAT: "/v1/chat/completions/render",
    Dialect.RESPONSES: "/v1/responses/render",
    Dialect.MESSAGES: "/v1/messages/render",
}

# Budgets and streams change no prompt, but may be refused; images are wanted as their places only.
_DROPPED = frozenset(
    {
        "stream",
        "stream_options",
        "max_tokens",
        "max_completion_tokens",
        "max_output_tokens",
        "min_tokens",
        "use_beam_search",
        "n",
        "background",
        "store",
    }
)
_OF_COUNT_TOKENS = ("messages", "system", "tools", "tool_choice", "thinking", "output_config", "chat_template_kwargs")


def render_body(prompt: ChatPrompt, ask: Ask | None, model: str) -> dict[str, Any]:
    """The body for ``RENDER``'s path of the request's dialect; without a request, that of a chat."""
    if ask is None:
        return {"model": model, "mm_payload": "none", **_chat(prompt)}
    kept = {key: value for key, value in ask.document.items() if key not in _DROPPED}
    body = {**kept, "model": model, "mm_payload": "none"}
    if ask.dialect is Dialect.MESSAGES:
        body["max_tokens"] = 1
        if _thinks(body.get("thinking")):  # its budget would have to be below max_tokens, and renders nothing
            del body["thinking"]
    return body


def count_tokens_body(ask: Ask, model: str) -> dict[str, Any]:
    """The body for ``/v1/messages/count_tokens``."""
    return {"model": model, **{key: ask.document[key] for key in _OF_COUNT_TOKENS if key in ask.document}}


def _thinks(thinking: Any) -> bool:
    return isinstance(thinking, Mapping) and thinking.get("type") == "enabled"


def _chat(prompt: ChatPrompt) -> dict[str, Any]:
    fields = {
        "messages": prompt.messages,
        "tools": prompt.tools or None,
        "add_generation_prompt": prompt.add_generation_prompt,
        "continue_final_message": prompt.continue_final_message,
        "add_special_tokens": prompt.add_special_tokens,
        "chat_template_kwargs": dict(prompt.chat_template_kwargs) or None,
        "documents": prompt.documents,
        "reasoning_effort": prompt.reasoning_effort,
    }
    return {key: value for key, value in fields.items() if value is not None}
