"""Conversations to play: a coding agent's, made from a seed, or recorded ones from a file.

Only what the client would send is played; what the model said in the recording stays in the conversation, so every
target gets the same requests. The servers' weights are random, so how long an answer is must be asked for: as many
tokens as the recorded one has, at about four characters each.
"""

from __future__ import annotations

import gzip
import json
import lzma
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.agent import agent_conversation

CHARACTERS_A_TOKEN = 4
ANSWER_TOKENS = (8, 128)

# Of the made conversations: requests, and what each adds to the next (bytes; a quarter of it in tokens).
MADE_REQUESTS = (4, 10)
MADE_GROWTH_BYTES = (1_000, 3_500)


class NoConversations(Exception):
    """The file holds none, or none that can be played."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: the messages up to an answer, and about how many tokens that answer had."""

    messages: int
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """``asks`` in turn; each sends the leading ``messages`` of them and the tools."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    asks: tuple[Ask, ...]


def made(seed: int, count: int) -> list[Conversation]:
    """``count`` coding agents with one system prompt and one set of tools, each growing at a pace of its own.

    They begin with about 1,000 tokens and end, most of them, with 3,000 to 8,000: four to ten requests, between which
    come tool results of 1,000 to 3,500 bytes of Python's own library. The same seed and the same Python give the same.
    """
    dice = random.Random(seed)
    found = []
    for number in range(count):
        agent = agent_conversation(1000 * seed + number, dice.randint(*MADE_REQUESTS), dice.randint(*MADE_GROWTH_BYTES))
        messages, ends = agent.messages, agent.ends
        asks = []
        for end in ends:
            said = messages[end] if end < len(messages) else {"content": "Done; all of it passes now."}
            asks.append(Ask(end, answer_tokens(said)))
        found.append(Conversation(tuple(messages), tuple(agent.tools), tuple(asks)))
    return found


def read(path: Path) -> list[Conversation]:
    """Conversations of a file, ``.json`` or ``.jsonl``, plain, ``.gz`` or ``.xz``. Raises ``NoConversations``.

    Each is a list of OpenAI messages, or an object with such a list as ``messages`` (or ``traj``, as tau-bench names
    it) and maybe ``tools``. There is one request before each message of the assistant.
    """
    unpack = {".gz": gzip.decompress, ".xz": lzma.decompress}.get(path.suffix, bytes)
    try:
        text = unpack(path.read_bytes()).decode()
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise NoConversations(f"{path}: {error}") from None
    found = [conversation for document in _documents(path, text) if (conversation := _conversation(document))]
    if not found:
        raise NoConversations(f"{path} holds no conversation with an answer of an assistant")
    return found


def _documents(path: Path, text: str) -> Iterator[Any]:
    try:
        if ".jsonl" in path.suffixes:
            yield from (json.loads(line) for line in text.splitlines() if line.strip())
        else:
            document = json.loads(text)
            yield from document if isinstance(document, list) else [document]
    except ValueError as error:
        raise NoConversations(f"{path} is not JSON: {error}") from None


def _conversation(document: Any) -> Conversation | None:
    named = document if isinstance(document, dict) else {"messages": document}
    messages = named.get("messages") or named.get("traj")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return None
    asks = [
        Ask(place, answer_tokens(message))
        for place, message in enumerate(messages)
        if message.get("role") == "assistant" and place
    ]
    return Conversation(tuple(messages), tuple(named.get("tools") or ()), tuple(asks)) if asks else None


def answer_tokens(message: dict[str, Any]) -> int:
    """About how many tokens an assistant's message has, within ``ANSWER_TOKENS``."""
    calls = message.get("tool_calls")
    characters = len(str(message.get("content") or "")) + (len(json.dumps(calls)) if calls else 0)
    least, most = ANSWER_TOKENS
    return min(most, max(least, characters // CHARACTERS_A_TOKEN))


def body(conversation: Conversation, ask: Ask, model: str, budget_tokens: int, end_token: int) -> dict[str, Any]:
    """A request as an agent sends it, and what makes random weights end their answer where the recorded one did.

    The token that ends an answer is the likeliest from the start, and forbidden until the answer is long enough. So
    neither the budget nor ``ignore_eos`` tells anybody beforehand how long it will be.
    """
    answer = min(ask.answer_tokens, budget_tokens)
    document: dict[str, Any] = {
        "model": model,
        "messages": list(conversation.messages[: ask.messages]),
        "max_tokens": budget_tokens,
        "min_tokens": answer,
        "stop_token_ids": [end_token],
        "logit_bias": {str(end_token): 100},
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if conversation.tools:
        document["tools"] = list(conversation.tools)
    return document
