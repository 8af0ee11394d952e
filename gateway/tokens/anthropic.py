"""What vLLM's ``/v1/messages`` asks a model's chat template, and what it then makes of a conversation.

vLLM 0.32 (``entrypoints/anthropic/serving.py``) tries the template out twice: may system messages stand among the
others, and does the effort ``none`` switch thinking off? The answers hold for all requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import jinja2
import jinja2.sandbox

from gateway.tokens.errors import CannotCount
from gateway.types import ChatPrompt

EFFORTS = ("low", "medium", "high", "xhigh", "max")

_TRIAL = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]


def wants_system_first(sources: Iterable[str]) -> bool:
    """Whether any of the templates fails on a system message in the middle.

    It is tried without the functions that templates usually find, as vLLM does: one that calls ``raise_exception`` or
    ``strftime_now`` fails, and so does one with ``{% generation %}``. A model without a template merges, too.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    found = False
    for source in sources:
        found = True
        try:
            environment.from_string(source).render(messages=_TRIAL, add_generation_prompt=False)
        except Exception:  # vLLM expects template errors only; any other would have stopped it from starting
            return True
    return not found


def effort_without_thinking(render: Callable[[ChatPrompt], str]) -> str:
    """The effort that stands for a thinking switched off: ``low`` if the template refuses or ignores ``none``."""

    def rendered(effort: str) -> str | None:
        try:
            return render(ChatPrompt([{"role": "user", "content": "Hi"}], reasoning_effort=effort))
        except CannotCount:
            return None

    none = rendered("none")
    return "low" if none is None or none in map(rendered, EFFORTS) else "none"


def settled(prompt: ChatPrompt, system_first: bool, effort_of_none: str) -> ChatPrompt:
    """The chat request that vLLM makes of a messages request, given the template's answers."""
    effort = effort_of_none if prompt.reasoning_effort == "none" else prompt.reasoning_effort
    messages = _merged(prompt.messages) if system_first else prompt.messages
    return replace(prompt, messages=messages, reasoning_effort=effort, from_messages=False)


def _merged(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All system texts as one message in front, joined by nothing."""
    texts = [message["content"] for message in messages if message["role"] == "system"]
    if len(texts) < 2 and (not texts or messages[0]["role"] == "system"):
        return messages
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "".join(texts)}, *others]
