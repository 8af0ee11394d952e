"""All rules in the order in which they are tried, and the trying."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.api.body import LenientObject
from gateway.api.repairs import bodies, calls, content, messages, order, responses, tools
from gateway.api.repairs.look import look
from gateway.api.repairs.rule import Rule
from gateway.types import Dialect, ModelFacts

_CHAT = frozenset({Dialect.CHAT})
_TEXT = frozenset({Dialect.COMPLETIONS})
_MESSAGES = frozenset({Dialect.MESSAGES})
_RESPONSES = frozenset({Dialect.RESPONSES})

RULES: tuple[Rule, ...] = (
    Rule("responses_body", _CHAT, bodies.responses_body),
    Rule("stream_options", _CHAT | _TEXT, bodies.stream_options),
    Rule("empty_suffix", _TEXT, bodies.empty_suffix),
    Rule("flat_tools", _CHAT, tools.flat_tools),
    Rule("hosted_tools", _CHAT, tools.hosted_tools),
    Rule("empty_tools", _CHAT, tools.empty_tools),
    Rule("tool_choice", _CHAT, tools.tool_choice),
    Rule("null_name", _CHAT, content.null_name, "name"),
    Rule("content_type", _CHAT, content.content_type, "content"),
    Rule("anthropic_blocks", _CHAT, content.anthropic_blocks, "blocks"),
    Rule("content_parts", _CHAT, content.content_parts, "parts"),
    Rule("tool_calls", _CHAT, calls.tool_calls, "odd_calls"),
    Rule("tool_arguments", _CHAT, calls.tool_arguments, "calls"),
    Rule("missing_results", _CHAT, calls.missing_results, "calls"),
    Rule("orphan_results", _CHAT, order.orphan_results, "results"),
    Rule("tool_ids", _CHAT, calls.tool_ids, "calls"),
    Rule("developer_role", _CHAT, order.developer_role, "developer"),
    Rule("system_first", _CHAT, order.system_first, "late"),
    Rule("no_system", _CHAT, order.no_system, "system"),
    Rule("alternating_roles", _CHAT, order.alternating_roles, "turns"),
    Rule("user_message", _CHAT, order.user_message),
    Rule("leading_roles", _MESSAGES, messages.leading_roles),
    Rule("server_tools", _MESSAGES, messages.server_tools),
    Rule("block_forms", _MESSAGES, messages.block_forms),
    Rule("thinking_budget", _MESSAGES, messages.thinking_budget),
    Rule("null_fields", _RESPONSES, responses.null_fields),
    Rule("response_tools", _RESPONSES, responses.response_tools),
    Rule("input_items", _RESPONSES, responses.input_items),
)

_BY_DIALECT = {dialect: tuple(rule for rule in RULES if dialect in rule.dialects) for dialect in Dialect}


@dataclass(frozen=True, slots=True)
class Repaired:
    """The document as it should have been, and the rules that made it so, in order."""

    document: dict[str, Any]
    names: tuple[str, ...]


def repair(
    document: Mapping[str, Any], dialect: Dialect, facts: ModelFacts, disabled: Collection[str] = ()
) -> Repaired | None:
    """What vLLM would refuse, put right; ``None`` if there is nothing to put right. ``document`` is not changed."""
    chat = dialect is Dialect.CHAT
    marks = look(document.get("messages")) if chat else frozenset()
    mended: Mapping[str, Any] = document
    names: list[str] = []
    for rule in _BY_DIALECT[dialect]:
        if (rule.mark is not None and rule.mark not in marks) or rule.name in disabled:
            continue
        better = rule.mend(mended, facts)
        if better is not None:
            if chat and better.get("messages") is not mended.get("messages"):
                marks = look(better.get("messages"))
            mended = better
            names.append(rule.name)
    return Repaired(dict(mended), tuple(names)) if names else None


def repaired_body(
    body: bytes, document: Mapping[str, Any], dialect: Dialect, facts: ModelFacts, disabled: Collection[str] = ()
) -> tuple[bytes, tuple[str, ...]] | None:
    """``body``, whose parsed form is ``document``, repaired, and the rules' names; ``None`` if it is right as it is."""
    repaired = repair(document, dialect, facts, disabled)
    if repaired is None:
        return None
    if not isinstance(document, LenientObject):
        return orjson.dumps(repaired.document), repaired.names
    again = repair(json.loads(body.decode("utf-8-sig")), dialect, facts, disabled)
    if again is None:
        return None
    return json.dumps(again.document).encode("ascii"), again.names
