"""The body that goes upstream: the client's own bytes, unless a decision changed the request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import orjson

from gateway.api.body import LenientObject, integer
from gateway.types import Ask, Dialect, Offer

# Anthropic's least thinking budget, which vLLM holds clients to.
LEAST_THINKING_TOKENS = 1024

_DROP: Any = object()
_BLANKS = b" \t\r\n"


def upstream_body(ask: Ask, offer: Offer) -> bytes:
    """The body of ``ask`` as ``offer`` needs it.

    Changed are: the output budget, if clamped; budgets ≤ 0, dropped; and ``stream_options``, so that usage always comes
    (the relay strips what the client did not ask for). Everything else keeps its value, and in most cases its bytes.
    """
    changes = _changes(ask, offer)
    if not changes:
        return ask.body
    if _DROP not in changes.values() and changes.keys().isdisjoint(ask.document):
        return _spliced(ask.body, changes)
    return _encoded(ask, changes)


def with_model(ask: Ask, model: str) -> Ask:
    """``ask`` for another model."""
    change = {"model": model}
    document = _changed(ask.document, change)
    if isinstance(ask.document, LenientObject):
        document = LenientObject(document)
    return replace(ask, model=model, body=_encoded(ask, change), document=document)


def _changes(ask: Ask, offer: Offer) -> dict[str, Any]:
    if not ask.counted:
        return {}
    changes: dict[str, Any] = dict.fromkeys(ask.drop_fields, _DROP)
    if offer.clamped and offer.output_tokens is not None:
        changes[ask.output_field] = offer.output_tokens
        if ask.dialect is Dialect.CHAT and ask.output_field == "max_completion_tokens" and "max_tokens" in ask.document:
            changes["max_tokens"] = _DROP  # it would contradict the field that wins
        if ask.dialect is Dialect.MESSAGES:
            changes |= _smaller_thinking(ask, offer.output_tokens)
    if ask.stream and ask.dialect in (Dialect.CHAT, Dialect.COMPLETIONS):
        changes |= _usage_options(ask)
    return changes


def _smaller_thinking(ask: Ask, output_tokens: int) -> dict[str, Any]:
    """vLLM refuses a thinking budget that is not below ``max_tokens``, or below 1024; without one the model judges."""
    thinking = ask.document.get("thinking")
    if not isinstance(thinking, dict):
        return {}
    budget = integer(thinking.get("budget_tokens"))
    if budget is None or budget < output_tokens or thinking.get("type") != "enabled":
        return {}
    if output_tokens <= LEAST_THINKING_TOKENS:
        return {"thinking": {"type": "adaptive"}}
    return {"thinking": {**thinking, "budget_tokens": output_tokens - 1}}


def _usage_options(ask: Ask) -> dict[str, Any]:
    options = ask.document.get("stream_options")
    if options is None:
        return {"stream_options": {"include_usage": True}}
    if not isinstance(options, dict) or ask.include_usage:
        return {}  # as wished already; or no object, which is vLLM's to refuse
    asked = {key: value for key, value in options.items() if key != "continuous_usage_stats"}
    return {"stream_options": {**asked, "include_usage": True}}


def _spliced(body: bytes, changes: Mapping[str, Any]) -> bytes:
    """``body`` with new keys before its last brace: no need to encode a long conversation again."""
    head = body.rstrip(_BLANKS)[:-1].rstrip(_BLANKS)
    comma = b"" if head.endswith(b"{") else b","
    return head + comma + orjson.dumps(changes)[1:]


def must_be_read_anew(ask: Ask) -> bool:
    """Whether orjson cannot write the document true to the original, so that ``json`` must read and write the body."""
    return isinstance(ask.document, LenientObject)


def _encoded(ask: Ask, changes: Mapping[str, Any]) -> bytes:
    """The document encoded anew with ``changes``; what orjson cannot write true to the original, ``json`` writes."""
    if not must_be_read_anew(ask):
        return orjson.dumps(_changed(ask.document, changes))
    return json.dumps(_changed(json.loads(ask.body.decode("utf-8-sig")), changes)).encode("ascii")


def _changed(document: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    changed = {key: value for key, value in document.items() if changes.get(key) is not _DROP}
    changed.update((key, value) for key, value in changes.items() if value is not _DROP)
    return changed
