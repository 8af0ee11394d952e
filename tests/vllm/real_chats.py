"""Real agent conversations: every request of the 200 airline chats that tau-bench recorded with gpt-4o."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "tau_bench" / "airline_gpt4o.json.xz"


def chats() -> list[list[dict[str, Any]]]:
    """Conversations as lists of OpenAI messages."""
    loaded: list[list[dict[str, Any]]] = json.loads(lzma.decompress(FILE.read_bytes()))
    return loaded


def requests() -> Iterator[dict[str, Any]]:
    """Bodies less the model: for each answer, the conversation before it."""
    for chat in chats():
        for place, message in enumerate(chat):
            if message["role"] == "assistant":
                yield {"messages": chat[:place]}
