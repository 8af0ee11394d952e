"""Recorded conversations as traffic: ``--conversations FILE``.

The file has one JSON object a line (JSONL; ``.gz`` is unpacked), each a conversation of chat messages as a client last
sent it, with the last answer:

    {"messages": [{"role": "system", "content": "…"}, {"role": "user", "content": "…"},
                  {"role": "assistant", "content": null, "tool_calls": […]},
                  {"role": "tool", "content": "…"}, {"role": "assistant", "content": "…"}],
     "tools": […]}

``tools`` is optional, and so is whatever else a line or a message has; a bare list of messages will do, too. Each
message of the assistant is the answer to all before it: so a conversation with seven of them is seven requests. A
message is turned into ids by itself (its role, its text and its tool calls), so that conversations that begin alike
have prompts that begin alike, and share cached blocks. Without a tokenizer an id stands for four characters; with
``--tokenizer FILE`` (a ``tokenizer.json``) ids are that tokenizer's. A template's own tokens are counted as four a
message.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.placing.traffic import Turn

Encode = Callable[[str], list[int]]
TEMPLATE_TOKENS = 4


def conversations(path: Path, encode: Encode) -> tuple[tuple[Turn, ...], ...]:
    """The file's conversations that have an answer. ``ValueError`` with the line's number if one cannot be read."""
    found = []
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            messages, tools = (item, None) if isinstance(item, list) else (item["messages"], item.get("tools"))
            turns = tuple(_turns(messages, tools, encode))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}, line {number}: not a conversation ({error!r})") from error
        if turns:
            found.append(turns)
    if not found:
        raise ValueError(f"{path} has no conversation with an answer")
    return tuple(found)


def by_characters(text: str) -> list[int]:
    """An id for every four characters: the same for the same text."""
    return [zlib.crc32(text[start : start + 4].encode()) for start in range(0, len(text), 4)]


def by_tokenizer(path: Path) -> Encode:
    """The ids of a ``tokenizer.json``."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def _turns(messages: list[dict[str, Any]], tools: Any, encode: Encode) -> Iterator[Turn]:
    new: list[int] = encode(json.dumps(tools, sort_keys=True)) if tools else []
    for place, message in enumerate(messages):
        ids = _ids(message, encode)
        if message["role"] != "assistant":
            new.extend(ids)
            continue
        following = messages[place + 1]["role"] if place + 1 < len(messages) else ""
        yield Turn(tuple(new), tuple(ids) or (0,), following in ("tool", "function"))
        new = []


def _ids(message: dict[str, Any], encode: Encode) -> list[int]:
    content = message.get("content") or ""
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True)
    calls = message.get("tool_calls") or message.get("function_call")
    if calls:
        text += json.dumps(calls, sort_keys=True)
    role = zlib.crc32(message["role"].encode()) | 1 << 40  # an id that no tokenizer has
    return [role] * TEMPLATE_TOKENS + encode(text)


def _lines(path: Path) -> Iterator[str]:
    if path.suffix == ".gz":
        with gzip.open(path, "rt", encoding="utf-8") as file:
            yield from file
    else:
        with path.open(encoding="utf-8") as file:
            yield from file
