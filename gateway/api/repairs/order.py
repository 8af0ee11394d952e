"""Repairs of roles and their order, where the model's template refuses what the client sent."""

from __future__ import annotations

from typing import Any

from gateway.api.repairs.look import LEADERS
from gateway.api.repairs.rule import Document, Message, each_message, merged, text_of
from gateway.types import ModelFacts

# What is said where a template demands a turn that the client did not send.
CONTINUE = "Continue."
GO_ON = "I will go on."


def developer_role(document: Document, facts: ModelFacts) -> dict[str, Any] | None:
    """``developer`` as ``system``, where the template refuses it or leaves it out."""
    if facts.takes_developer:
        return None

    def mend(message: Message) -> Message | None:
        return {**message, "role": "system"} if message.get("role") == "developer" else None

    return each_message(document, mend)


def system_first(document: Document, facts: ModelFacts) -> dict[str, Any] | None:
    """All system messages as one in front, where the template refuses any other place."""
    if facts.takes_late_system or not facts.takes_system:
        return None
    messages = _messages(document)
    systems = [message for message in messages if message.get("role") in LEADERS]
    if not systems or (len(systems) == 1 and messages[0] is systems[0]):
        return None
    first = {**systems[0], "content": _texts(systems)}
    return {**document, "messages": [first, *(m for m in messages if m.get("role") not in LEADERS)]}


def no_system(document: Document, facts: ModelFacts) -> dict[str, Any] | None:
    """System messages as the beginning of the first user's message, where the template has no such role (Gemma)."""
    if facts.takes_system:
        return None
    messages = _messages(document)
    systems = [message for message in messages if message.get("role") in LEADERS]
    rest = [message for message in messages if message.get("role") not in LEADERS]
    if not systems:
        return None
    told: Message = {"role": "user", "content": _texts(systems)}
    if rest and rest[0].get("role") == "user":
        told, rest = {**rest[0], "content": merged(told["content"], rest[0].get("content"))}, rest[1:]
    return {**document, "messages": [told, *rest]}


def orphan_results(document: Document, facts: ModelFacts) -> dict[str, Any] | None:
    """Results whose call is not in the history, told by the user, where the template refuses a result without one."""
    if facts.takes_orphan_results:
        return None
    mended: list[Message] = []
    open_ids: list[Any] = []
    messages = _messages(document)
    for message in messages:
        role = message.get("role")
        if role == "assistant":
            calls = message.get("tool_calls")
            open_ids = [one.get("id") for one in calls if isinstance(one, dict)] if isinstance(calls, list) else []
        elif role == "user" and not facts.takes_open_calls:
            open_ids = []  # missing_results has answered them; what comes later comes too late
        elif role == "tool" and message.get("tool_call_id") not in open_ids:
            message = {"role": "user", "content": f"Result of a tool:\n{text_of(message.get('content'))}"}
        mended.append(message)
    return (
        None if all(new is old for new, old in zip(mended, messages, strict=True)) else {**document, "messages": mended}
    )


def alternating_roles(document: Document, facts: ModelFacts) -> dict[str, Any] | None:
    """Neighbours of one role as one message, where the template demands that user and assistant take turns.

    Where it demands an answer to a tool's result before the user speaks again, it gets one.
    """
    if facts.takes_repeated_roles:
        return None
    messages = _messages(document)
    mended: list[Message] = []
    for message in messages:
        last = mended[-1] if mended else None
        if last is not None and _is_same_turn(last, message):
            mended[-1] = {**last, "content": merged(last.get("content"), message.get("content"))}
            continue
        if last is not None and last.get("role") == "tool" and message.get("role") == "user":
            mended += () if facts.takes_user_after_tool else ({"role": "assistant", "content": GO_ON},)
        mended.append(message)
    same = len(mended) == len(messages) and all(new is old for new, old in zip(mended, messages, strict=True))
    return None if same else {**document, "messages": mended}


def _is_same_turn(last: Message, message: Message) -> bool:
    role = message.get("role")
    return (
        role in ("user", "assistant")
        and last.get("role") == role
        and not last.get("tool_calls")
        and not message.get("tool_calls")
    )


def user_message(document: Document, facts: ModelFacts) -> dict[str, Any] | None:
    """A user's message, where the template demands one, or one first, and a client's own compaction has left none."""
    if facts.takes_no_user and facts.takes_assistant_first:
        return None
    messages = _messages(document)
    roles = [message.get("role") for message in messages]
    place = next((at for at, role in enumerate(roles) if role not in LEADERS), len(roles))
    is_first = not facts.takes_assistant_first and place < len(roles) and roles[place] != "user"
    is_missing = not facts.takes_no_user and bool(roles) and "user" not in roles
    if not is_first and not is_missing:
        return None
    asking: Message = {"role": "user", "content": CONTINUE}
    return {**document, "messages": [*messages[:place], asking, *messages[place:]]}


def _messages(document: Document) -> list[Message]:
    messages = document.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return []
    return messages


def _texts(messages: list[Message]) -> str:
    return "\n\n".join(text for text in (text_of(message.get("content")) for message in messages) if text)
