"""DeepSeek V3.2's chats as text. There is no chat template: the format is code, and vLLM 0.32 has its own of it.

Each user message opens the answer that follows it, tool results stand in one block that does the same, and reasoning is
kept after the last user message only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.tokens.deepseek_texts import ASSISTANT, BEGIN, DSML, END, THINK, THINK_END, USER, V32_TOOLS
from gateway.tokens.errors import CannotCount
from gateway.tokens.messages import ContentFormat, Message


class DeepseekV32:
    """Renders messages that ``conversation`` has made plain."""

    content_format: ContentFormat = "string"

    def render(self, messages: list[Message], tools: list[dict[str, Any]] | None, variables: Mapping[str, Any]) -> str:
        """The prompt as text. Raises ``CannotCount`` for chats that vLLM refuses."""
        thinking = bool(variables.get("thinking") or variables.get("enable_thinking"))
        if tools:
            messages = [{"role": "system", "tools": tools}, *messages]
        if thinking and messages[-1]["role"] == "user":
            kept = _without_old_turns_thinking(messages)
            if len(kept) != len(messages):
                raise CannotCount("vLLM 0.32 cannot render a developer message before the last question", refused=True)
            messages = kept
        last = last_user(messages)
        try:
            return BEGIN + "".join(_rendered(place, messages, thinking, last) for place in range(len(messages)))
        except CannotCount:
            raise
        except Exception as error:  # tools or calls of a shape that the format does not know: vLLM fails as well
            raise CannotCount(f"the messages cannot be rendered: {error!r}") from error


def last_user(messages: Sequence[Message]) -> int:
    """Place of the last user or developer message; -1 if there is none."""
    return next((n for n in reversed(range(len(messages))) if messages[n]["role"] in ("user", "developer")), -1)


def tool_schemas(tools: Sequence[Mapping[str, Any]]) -> str:
    """The functions of ``tools``, a line of JSON each."""
    return "\n".join(as_json(tool["function"]) for tool in tools)


def dsml_calls(calls: Sequence[Mapping[str, Any]], block: str) -> str:
    """Tool calls in DeepSeek's markup, in a block of that name."""
    invokes = (
        f'<{DSML}invoke name="{call["function"]["name"]}">\n'
        f"{_dsml_parameters(call['function']['arguments'])}\n</{DSML}invoke>"
        for call in calls
    )
    return f"\n\n<{DSML}{block}>\n" + "\n".join(invokes) + f"\n</{DSML}{block}>"


def as_json(value: Any) -> str:
    """JSON as the format writes it."""
    return json.dumps(value, ensure_ascii=False)


def _dsml_parameters(arguments: Mapping[str, Any]) -> str:
    return "\n".join(
        f'<{DSML}parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{value if isinstance(value, str) else as_json(value)}</{DSML}parameter>"
        for key, value in arguments.items()
    )


def _without_old_turns_thinking(messages: Sequence[Message]) -> list[Message]:
    """Reasoning before the last user message goes, and so do developer messages there (vLLM's rule)."""
    last = last_user(messages)
    kept = []
    for place, message in enumerate(messages):
        if place >= last or message["role"] in ("user", "system", "tool"):
            kept.append(message)
        elif message["role"] == "assistant":
            kept.append({key: value for key, value in message.items() if key != "reasoning"})
    return kept


def _rendered(place: int, messages: Sequence[Message], thinking: bool, last: int) -> str:
    message = messages[place]
    role, content = message["role"], message.get("content") or ""
    opening = THINK if thinking and place >= last else THINK_END
    match role:
        case "system":
            return content + _tools_text(message)
        case "developer":
            if not content:
                raise CannotCount("a developer message is empty", refused=True)
            return f"{USER}{_tools_text(message)}\n\n# The user's message is: {content}{ASSISTANT}{opening}"
        case "user":
            return f"{USER}{content}{ASSISTANT}{opening}"
        case "tool":
            return _result(place, messages, content, opening)
        case "assistant":
            return _answer(message, content, thinking and place > last)
    raise CannotCount(f"there is no role {role}", refused=True)


def _tools_text(message: Message) -> str:
    tools = message.get("tools")
    return "\n\n" + V32_TOOLS % tool_schemas(tools) if tools else ""


def _result(place: int, messages: Sequence[Message], content: str, opening: str) -> str:
    """One result: the first opens the block, the one of the last call closes it."""
    caller = place - 1
    while caller >= 0 and messages[caller]["role"] == "tool":
        caller -= 1
    # vLLM looks at the last message where a chat begins with a result.
    calls = messages[caller].get("tool_calls")
    if place > 0 and (caller < 0 or messages[caller]["role"] != "assistant"):
        raise CannotCount("a tool result follows no assistant message", refused=True)
    number = place - caller
    if not calls or len(calls) < number:
        raise CannotCount("there are more tool results than calls", refused=True)
    text = "\n\n<function_results>" if number == 1 else ""
    text += f"\n<result>{content}</result>"
    return f"{text}\n</function_results>\n\n{opening}" if number == len(calls) else text


def _answer(message: Message, content: str, with_thinking: bool) -> str:
    calls, reasoning = message.get("tool_calls"), message.get("reasoning")
    thought = ""
    if with_thinking:
        if not (reasoning or calls):
            raise CannotCount("the last answer has neither reasoning nor tool calls", refused=True)
        thought = f"{reasoning or ''}{THINK_END}"
    return thought + content + (dsml_calls(calls, "function_calls") if calls else "") + END
