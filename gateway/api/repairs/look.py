"""One pass over a chat's messages that says which repairs have anything to look at."""

from __future__ import annotations

from typing import Any

# Content parts that vLLM 0.32 takes on the chat path (renderers/chat_utils.py).
TAKEN_PARTS = frozenset(
    {
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
    }
)
BLOCKS = frozenset({"tool_use", "tool_result"})

LEADERS = frozenset({"system", "developer"})


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
    before = None
    for index, message in enumerate(messages):
        if message.__class__ is not dict:
            return frozenset()
        role = message.get("role")
        content = message.get("content")
        if content.__class__ is not str and not (content is None and role == "assistant"):
            _look_at(content, message, marks)
        if role == "user":
            if before == "user" or before == "tool":
                marks.add("turns")
        elif role == "assistant":
            calls = message.get("tool_calls")
            if calls:
                _look_at_calls(calls, marks)
            if before == "assistant":
                marks.add("turns")
        elif role == "tool":
            marks.add("results")
        elif role in LEADERS:
            marks.add("system")
            if role == "developer":
                marks.add("developer")
            if index:
                marks.add("late")
        if len(message) > 2 and role != "tool" and message.get("name", "") is None:
            marks.add("name")
        before = role
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
    for call in calls:
        function = call.get("function") if call.__class__ is dict else None
        if (
            function.__class__ is not dict
            or call.get("type") != "function"
            or call.get("id").__class__ is not str
            or function.get("arguments").__class__ is not str
        ):
            marks.add("odd_calls")
            return
