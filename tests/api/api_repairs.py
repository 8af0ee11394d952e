"""What the tests of repairs share: messages, facts of a model, and a document repaired by the rules that are named."""

from __future__ import annotations

import copy
from typing import Any

from gateway.api.repairs.repair import repair
from gateway.types import Dialect, ModelFacts

KNOWN = ModelFacts((0, 32))
USER = {"role": "user", "content": "Hello."}
ASSISTANT = {"role": "assistant", "content": "Hello."}
SYSTEM = {"role": "system", "content": "Be brief."}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "a.txt"}
SCHEMA = {"type": "object", "properties": {}}
TOOL = {"type": "function", "function": {"name": "ls", "description": "List.", "parameters": SCHEMA}}


def call(arguments: Any = "{}", **fields: Any) -> dict[str, Any]:
    one = {"id": "call_1", "type": "function", "function": {"name": "ls", "arguments": arguments}, **fields}
    return {"role": "assistant", "content": None, "tool_calls": [one]}


def mended(
    document: dict[str, Any], *names: str, dialect: Dialect = Dialect.CHAT, facts: ModelFacts = KNOWN
) -> dict[str, Any]:
    """``document`` repaired by exactly the rules ``names``; it is not changed itself, and needs nothing more."""
    before = copy.deepcopy(document)
    repaired = repair(document, dialect, facts)
    assert document == before
    assert repaired is not None
    assert repaired.names == names
    assert repair(repaired.document, dialect, facts) is None
    assert repair(document, dialect, facts, names) is None or len(names) == 1
    return repaired.document


def mended_chat(messages: list[Any], *names: str, **facts: Any) -> list[Any]:
    document = mended({"model": "m", "messages": messages}, *names, facts=ModelFacts((0, 32), **facts))
    assert document["model"] == "m"
    result: list[Any] = document["messages"]
    return result
