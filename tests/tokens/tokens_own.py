"""Random conversations with what vLLM 0.32.0's own front end counted for them, for formats that are no templates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from families.random_chats import AgentChats
from tokens_helpers import chat_ask

from gateway.tokens.errors import CannotCount
from gateway.tokens.local import template_variables
from gateway.tokens.own import OwnChats
from gateway.types import ChatPrompt

KNOWN: dict[str, Any] = json.loads(Path(__file__).with_name("own_known.json").read_text(encoding="utf-8"))


def known_chats(name: str) -> Iterator[tuple[ChatPrompt, int | None]]:
    """Chats and their prompt tokens; ``None`` where vLLM refused them."""
    chats = AgentChats(KNOWN["seed"])
    for known in KNOWN[name]:
        kwargs, tokens = known if isinstance(known, list) else (None, known)
        body = chats.body() | ({"chat_template_kwargs": kwargs} if kwargs else {})
        prompt = chat_ask(**body).prompt
        assert isinstance(prompt, ChatPrompt)
        yield prompt, tokens


def counted(chats: OwnChats, prompt: ChatPrompt) -> int | None:
    """Our count, or ``None`` where there is none."""
    try:
        return chats.tokens(prompt, template_variables(prompt, {}))
    except CannotCount:
        return None
