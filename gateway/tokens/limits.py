"""Shapes of prompts that nobody has but who wants to do harm: they are estimated by their size."""

from __future__ import annotations

from gateway.tokens.errors import CannotCount
from gateway.types import ChatPrompt, Prompt

# Agents' conversations have hundreds of messages, the longest some thousands. A message costs some ten microseconds
# of a processor to normalise and render, and some kilobytes meanwhile, however short it is.
MAX_MESSAGES = 20_000
MAX_PARTS = 50_000


def refuse_absurd(prompt: Prompt) -> None:
    """Raise ``CannotCount`` for a chat of more messages, or parts of them, than are rendered here."""
    if not isinstance(prompt, ChatPrompt):
        return
    number = len(prompt.messages)
    if number > MAX_MESSAGES:
        raise CannotCount(f"{number} messages are too many to count", refused=True)
    parts = 0
    for message in prompt.messages:
        content = message.get("content")
        if isinstance(content, list):
            parts += len(content)
    if parts > MAX_PARTS:
        raise CannotCount(f"{parts} parts of messages are too many to count", refused=True)
