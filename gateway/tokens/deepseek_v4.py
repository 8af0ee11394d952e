"""DeepSeek V4's chats as text. There is no chat template: the format is code, and vLLM 0.32 has its own of it.

Tool results are parts of a user message, in the order of the calls. Where there are no tools, reasoning of past turns
goes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gateway.tokens.deepseek_texts import (
    ASSISTANT,
    BEGIN,
    END,
    REMINDER,
    TASKS,
    THINK,
    THINK_END,
    USER,
    V4_EFFORT,
    V4_TOOLS,
)
from gateway.tokens.deepseek_v32 import dsml_calls, tool_schemas
from gateway.tokens.errors import CannotCount
from gateway.tokens.messages import ContentFormat, Message


@dataclass(frozen=True, slots=True)
class _Part:
    """``call_id`` means something for results only."""

    text: str
    is_result: bool = False
    call_id: Any = None


@dataclass(slots=True)
class _Turn:
    """One message. A user's has ``parts``: texts and tool results."""

    role: str
    content: str = ""
    parts: list[_Part] = field(default_factory=list)
    calls: Any = None
    tools: Any = None
    reasoning: str = ""
    task: str | None = None


class DeepseekV4:
    """Renders messages that ``conversation`` has made plain."""

    content_format: ContentFormat = "openai"

    def render(self, messages: list[Message], tools: list[dict[str, Any]] | None, variables: Mapping[str, Any]) -> str:
        """The prompt as text. Raises ``CannotCount`` for chats that vLLM refuses."""
        try:
            turns = _in_call_order(_turns(messages if not tools else _with_tools(messages, tools)))
            thinking, effort = _mode(variables)
            dropping = bool(variables.get("drop_thinking", True)) and not any(turn.tools for turn in turns)
            if thinking and dropping:
                turns = _without_old_turns_thinking(turns)
            text = BEGIN + (V4_EFFORT[effort] if thinking and turns else "")
            last = _last_user(turns)
            return text + "".join(_rendered(place, turns, thinking, dropping, last) for place in range(len(turns)))
        except CannotCount:
            raise
        except Exception as error:  # tools or calls of a shape that the format does not know: vLLM fails as well
            raise CannotCount(f"the messages cannot be rendered: {error!r}") from error


def _mode(variables: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether the answer begins with thinking (the default), and how much of it."""
    thinking = bool(variables.get("thinking") or variables.get("enable_thinking"))
    if "thinking" not in variables and "enable_thinking" not in variables:
        thinking = True
    effort = variables.get("reasoning_effort")
    if not isinstance(effort, str):
        return thinking, "high"
    if effort == "none":
        return False, "low"
    if effort in ("low", "minimal", "medium"):
        return thinking, "low"
    return thinking, "max" if effort == "max" else "high"


def _with_tools(messages: Sequence[Message], tools: Any) -> list[Message]:
    """Tools belong to the first system message."""
    place = next((place for place, message in enumerate(messages) if message["role"] == "system"), None)
    if place is None:
        return [{"role": "system", "tools": tools}, *messages]
    return [*messages[:place], {**messages[place], "tools": tools}, *messages[place + 1 :]]


def _turns(messages: Sequence[Message]) -> list[_Turn]:
    """Messages with tool results and user messages that follow each other made one."""
    turns: list[_Turn] = []
    for message in messages:
        role, content = message["role"], _flat(message.get("content"))
        before = turns[-1] if turns and turns[-1].role == "user" else None
        if role == "tool":
            part = _Part(f"<tool_result>{content}</tool_result>", True, message.get("tool_call_id", ""))
            if before is None:
                turns.append(_Turn("user", parts=[part]))
            else:
                before.parts.append(part)
        elif role == "user":
            if before is not None and before.task is None:
                before.parts.append(_Part(content))
            else:
                turns.append(_Turn("user", parts=[_Part(content)], task=message.get("task")))
        else:
            turns.append(
                _Turn(
                    role,
                    content,
                    calls=message.get("tool_calls"),
                    tools=message.get("tools"),
                    reasoning=message.get("reasoning") or "",
                    task=message.get("task"),
                )
            )
    return turns


def _flat(content: Any) -> str:
    if isinstance(content, list):
        if any(part["type"] != "text" for part in content):
            raise CannotCount("a content part is no text")
        return "\n\n".join(part["text"] for part in content)
    return content or ""


def _in_call_order(turns: list[_Turn]) -> list[_Turn]:
    """Results of a message sorted by the calls before it; what is no result keeps its place."""
    order: dict[Any, int] = {}
    for turn in turns:
        if turn.role == "assistant" and turn.calls:
            order = {_call_id(call): place for place, call in enumerate(turn.calls) if _call_id(call)}
        elif turn.role == "user" and order:
            results = (part for part in turn.parts if part.is_result)
            ordered = iter(sorted(results, key=_place_in(order)))
            turn.parts = [next(ordered) if part.is_result else part for part in turn.parts]
    return turns


def _call_id(call: Mapping[str, Any]) -> Any:
    return call.get("id") or call["function"].get("id")


def _place_in(order: Mapping[Any, int]) -> Callable[[_Part], int]:
    return lambda part: order.get(part.call_id, 0)


def _last_user(turns: Sequence[_Turn]) -> int:
    return next((n for n in reversed(range(len(turns))) if turns[n].role in ("user", "developer")), -1)


def _without_old_turns_thinking(turns: Sequence[_Turn]) -> list[_Turn]:
    """Reasoning before the last user message goes, and so do developer messages there (vLLM's rule)."""
    last = _last_user(turns)
    kept = []
    for place, turn in enumerate(turns):
        if place >= last or turn.role in ("user", "system", "latest_reminder"):
            kept.append(turn)
        elif turn.role == "assistant":
            kept.append(replace(turn, reasoning=""))
    return kept


def _rendered(place: int, turns: Sequence[_Turn], thinking: bool, dropping: bool, last: int) -> str:
    turn = turns[place]
    text = _body(place, turns, thinking and (not dropping or place > last))
    following = turns[place + 1].role if place + 1 < len(turns) else None
    if following not in (None, "assistant", "latest_reminder"):
        return text
    opening = THINK if thinking else THINK_END
    if turn.task is not None:
        if turn.task not in TASKS:
            raise CannotCount(f"there is no task {turn.task}", refused=True)
        return text + (ASSISTANT + opening if turn.task == "action" else "") + TASKS[turn.task]
    if turn.role in ("user", "developer") or (turn.role == "system" and following != "latest_reminder"):
        return text + ASSISTANT + (opening if not dropping or place >= last else THINK_END)
    return text


def _body(place: int, turns: Sequence[_Turn], with_thinking: bool) -> str:
    turn = turns[place]
    tools = "\n\n" + V4_TOOLS % tool_schemas(turn.tools) if turn.tools else ""
    match turn.role:
        case "system":
            return turn.content + tools
        case "developer":
            if not turn.content:
                raise CannotCount("a developer message is empty", refused=True)
            return USER + turn.content + tools
        case "user":
            return USER + "\n\n".join(part.text for part in turn.parts)
        case "latest_reminder":
            return REMINDER + turn.content
        case "assistant":
            answers_task = place > 0 and turns[place - 1].task is not None
            thought = f"{turn.reasoning}{THINK_END}" if with_thinking and not answers_task else ""
            return thought + turn.content + (dsml_calls(turn.calls, "tool_calls") if turn.calls else "") + END
    raise CannotCount(f"there is no role {turn.role}", refused=True)
