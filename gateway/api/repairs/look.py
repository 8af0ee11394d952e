"""One pass over a chat's messages that says which repairs have anything to look at."""

from __future__ import annotations

from typing import Any

# Tuples, not sets: what is looked up comes from clients and may be a list.

# Content parts that vLLM 0.32 takes on the chat path (renderers/chat_utils.py).
TAKEN_PARTS = (
    "image_url",
    "image_pil",
    "image_embeds",
    "audio_url",
    "audio_embeds",
    "input_audio",
    "video_url",
    "video_embeds",
    "prompt_embeds",
    "refusal",
    "thinking",
    "tool_reference",
    "file",  # refused, and rightly so: nothing can be made of it
)
BLOCKS = ("tool_use", "tool_result")

LEADERS = ("system", "developer")


def look(messages: Any) -> frozenset[str]:
    """Marks of what stands in ``messages``; empty if they are no list of objects.

    ``name``: a null name; ``content``: content that is neither text nor parts; ``parts``, ``blocks``: parts of other
    APIs; ``calls``: tool calls at all, ``odd_calls``: some not in OpenAI's form;
    ``results``: tool results; ``system``: system or developer messages; ``developer``; ``late``: either beyond the
    first message; ``turns``: the same of user and assistant twice in a row, or a user's message right after a result.
    """
    if messages.__class__ is not list:
        return frozenset()
    marks: set[str] = set()
    add = marks.add
    before = None
    for message in messages:  # the most common cases first: this runs for every message of every request
        if message.__class__ is not dict:
            return frozenset()
        role = message.get("role")
        content = message.get("content")
        if content.__class__ is not str and not (content is None and role == "assistant"):
            _look_at(content, message, marks)
        if role == "tool":
            add("results")
        else:
            if role == "assistant":
                if message.get("tool_calls"):
                    _look_at_calls(message["tool_calls"], marks)
                if before == "assistant":
                    add("turns")
            elif role == "user":
                if before == "user" or before == "tool":
                    add("turns")
            elif role in LEADERS:
                add("system")
                if role == "developer":
                    add("developer")
                if before is not None:
                    add("late")
            if "name" in message and message["name"] is None:
                add("name")
        before = role or ""
    return frozenset(marks)


def _look_at(content: Any, message: dict[str, Any], marks: set[str]) -> None:
    if content.__class__ is list:
        for part in content:
            if part.__class__ is not dict:
                marks.add("parts")
                continue
            kind = part.get("type")
            if kind == "text":
                if part.get("text").__class__ is not str:
                    marks.add("parts")
            elif kind in BLOCKS:
                marks.add("blocks")
            elif kind not in TAKEN_PARTS:
                marks.add("parts")
    elif content is not None or ("content" in message and message.get("role") != "assistant"):
        marks.add("content")


def _look_at_calls(calls: Any, marks: set[str]) -> None:
    marks.add("calls")
    if calls.__class__ is not list:
        return
    try:
        for call in calls:
            if (
                call["function"]["arguments"].__class__ is not str
                or call["type"] != "function"
                or call["id"].__class__ is not str
            ):
                marks.add("odd_calls")
                return
    except (KeyError, TypeError, IndexError):
        marks.add("odd_calls")
