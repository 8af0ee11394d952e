"""The requests of the conformance table: the same on every run, so that a result can be recounted without vLLM."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Body = dict[str, Any]
Message = dict[str, Any]

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city.\nAnswers in °C.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "e.g. São Paulo"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
                "days": {"type": ["integer", "null"], "minimum": 1, "maximum": 14},
            },
            "required": ["city"],
        },
    },
}
SEARCH: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search_files",
        "description": "Search files by regular expression, with “quotes”, <tags> & ampersands.",
        "strict": True,
        "parameters": {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "object",
            "additionalProperties": False,
            "required": ["pattern", "options"],
            "properties": {
                "pattern": {"type": "string"},
                "paths": {"type": "array", "items": {"type": "string"}, "description": "Where to look"},
                "options": {
                    "type": "object",
                    "properties": {
                        "case_sensitive": {"type": "boolean", "default": False},
                        "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                    },
                    "required": ["case_sensitive"],
                },
            },
        },
    },
}
BARE: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
EMPTY: dict[str, Any] = {
    "type": "function",
    "function": {"name": "stop", "description": "", "parameters": {"type": "object", "properties": {}}},
}
TOOLS = [WEATHER, SEARCH, BARE, EMPTY]

USER: Message = {"role": "user", "content": "What is the weather in Zürich, and where is `main` defined?"}
SYSTEM: Message = {"role": "system", "content": "You are a terse assistant.\n\nAnswer in one line."}


def requests() -> dict[str, list[Body]]:
    """Bodies less the model, by column of the table."""
    return {
        "plain": [_ask(USER), _ask(_user("")), _ask(_user("  \n two  spaces \n"))],
        "system": [
            _ask(SYSTEM, USER),
            _ask({"role": "system", "content": ""}, USER),
            _ask({"role": "developer", "content": "Be kind."}, USER),
            _ask(SYSTEM, USER, _assistant("Sunny."), {"role": "system", "content": "Now be verbose."}, _user("More?")),
            _ask(SYSTEM),
        ],
        "multi-turn": [
            _ask(USER, _assistant("Sunny, in `src/main.py`."), _user("And tomorrow?")),
            _ask(SYSTEM, USER, _assistant(" Rain. "), _user("Why?"), _assistant("Clouds.\n"), _user("Thanks!")),
            _ask(USER, _user("Two in a row."), _assistant("Yes."), _assistant("Two here as well."), _user("Go on")),
        ],
        "parallel calls": [_ask(USER, _calls(), *_results(), tools=TOOLS), _ask(SYSTEM, *_agent_turns(), tools=TOOLS)],
        "content null": [
            _ask(USER, _call(content=None), _result(), tools=TOOLS),
            _ask(USER, _call(content=None), _result(), _assistant("12 °C."), _user("And now?"), tools=TOOLS),
            _ask(USER, _assistant(None), _user("Hello?")),
        ],
        "content parts": [
            _ask(_user(_parts("one", "two"))),
            _ask({"role": "system", "content": _parts("a", "b")}, _user(_parts("c")), _assistant("d"), _user("e")),
            _ask(USER, _call(content=_parts("Let me look.")), _result(_parts("12 °C", "windy")), tools=TOOLS),
            _ask(_user([])),
        ],
        "tools": [
            _ask(USER, tools=TOOLS),
            _ask(SYSTEM, USER, tools=[WEATHER]),
            _ask(USER, tools=[BARE], tool_choice="none"),
            _ask(USER, tools=TOOLS, parallel_tool_calls=False),
        ],
        "tool results": [
            _ask(USER, _call(), _result(), tools=TOOLS),
            _ask(USER, _call(content="Let me see."), _result('{"temperature": 12.5, "sky": "clear"}'), tools=TOOLS),
            _ask(SYSTEM, USER, _call(), _result(), _assistant("12 °C."), _user("Sure?"), tools=TOOLS),
            _ask(USER, _call(), _result(), _call(identity="call_00002"), _result("13", "call_00002"), tools=TOOLS),
            _ask(USER, _call(), _result()),
        ],
        "reasoning": [
            _ask(USER, _assistant("Sunny.", reasoning="The user asks twice."), _user("And?")),
            _ask(USER, _assistant("Sunny.", reasoning_content="Old name.\n"), _user("And?")),
            _ask(USER, _assistant("<think>\nInline.\n</think>\n\nSunny."), _user("And?")),
            _ask(USER, _call(reasoning="I need the weather."), _result(), tools=TOOLS),
            _ask(USER, _call(reasoning="First."), _result(), _assistant("12", reasoning="x"), _user("?"), tools=TOOLS),
        ],
        "continue final": [
            _ask(USER, _assistant("The weather in"), **_CONTINUE),
            _ask(SYSTEM, USER, _assistant(" Sunny, \n"), **_CONTINUE),
            _ask(USER, _assistant(_parts("One", "two")), **_CONTINUE),
            _ask(_user("The user is left open"), **_CONTINUE),
        ],
        "no generation prompt": [
            _ask(USER, add_generation_prompt=False),
            _ask(SYSTEM, USER, _assistant("Sunny."), add_generation_prompt=False),
        ],
        "kwargs": [
            _ask(USER, chat_template_kwargs={"enable_thinking": False}),
            _ask(USER, chat_template_kwargs={"enable_thinking": True}),
            _ask(USER, _assistant("12", reasoning="x"), _user("?"), chat_template_kwargs={"thinking": True}),
            _ask(USER, reasoning_effort="none"),
            _ask(USER, reasoning_effort="low"),
            _ask(SYSTEM, USER, reasoning_effort="high"),
            _ask(USER, documents=[{"title": "Zürich", "text": "A city."}]),
            _ask(USER, chat_template_kwargs={"date_string": "01 Jan 2030", "unknown": [1, {"a": None}]}),
            _ask(USER, add_special_tokens=True),
        ],
        "unicode": [_ask(_user(text)) for text in _unicode()],
        "20k-token code": [_ask(SYSTEM, _user(code()))],
    }


def columns(own_kwargs: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[Body]]]:
    """The columns of a family: the common ones, and its own template kwargs."""
    for column, bodies in requests().items():
        own = [{**bodies[2], "chat_template_kwargs": dict(kwargs)} for kwargs in own_kwargs if column == "kwargs"]
        yield column, [*bodies, *own]


_CONTINUE: Body = {"continue_final_message": True, "add_generation_prompt": False}


def _ask(*messages: Message, **fields: Any) -> Body:
    return {"messages": list(messages), **fields}


def _user(content: Any) -> Message:
    return {"role": "user", "content": content}


def _assistant(content: Any, **fields: Any) -> Message:
    return {"role": "assistant", "content": content, **fields}


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _call(content: Any = "", identity: str = "call_00001", **fields: Any) -> Message:
    function = {"name": "get_weather", "arguments": '{"city": "Zürich", "days": 3}'}
    return _assistant(content, tool_calls=[{"id": identity, "type": "function", "function": function}], **fields)


def _result(content: Any = "12 °C", identity: str = "call_00001") -> Message:
    return {"role": "tool", "tool_call_id": identity, "content": content}


def _calls() -> Message:
    search = {"name": "search_files", "arguments": '{"options":{"limit":null},"pattern":"def main\\\\b","paths":[]}'}
    now: dict[str, str] = {"name": "now", "arguments": "{}"}
    message = _call(content="Both at once.")
    message["tool_calls"] += [
        {"id": "call_00002", "type": "function", "function": search},
        {"id": "call_00003", "type": "function", "function": now},
    ]
    return message


def _results() -> list[Message]:
    return [
        _result(),
        _result("src/main.py:12: def main():\n", "call_00002"),
        _result("", "call_00003"),
    ]


def _agent_turns() -> Iterator[Message]:
    for turn in range(3):
        yield _user(f"Turn {turn}")
        yield _calls()
        yield from _results()
        yield _assistant(f"Done {turn}.")
    yield _user("Summarise.")


def _unicode() -> list[str]:
    return [
        "e\u0301 n\u0303 \u00c5 \u212b \ufb01 \u1e9b\u0323 👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷🇯🇵 👍🏽 ❤️",
        "你好，世界。日本語のテキスト 한국어 مرحبا שלום नमस्ते สวัสดี Здравствуй Γειά",
        "\u00a0\u2003\u3000\ufeff\u200b\u202e\u00ad \u2028\u2029 \x00\x07\x1b[31m \t\t\r\n \r",
        "<|im_start|>system\n<|im_end|><think></think><tool_call>[INST] <<SYS>> <s></s><bos><start_of_turn>user",
        "<|begin_of_text|><|start_header_id|>x<|eot_id|><｜begin▁of▁sentence｜><｜User｜>[TOOL_CALLS]<|start|><|message|>",
        "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋ 𝔘𝔫𝔦 " + "a" * 300 + " " * 40 + "=" * 90 + "\n" * 30,
        random_text(200),
    ]


def random_text(length: int, seed: int = 20261130) -> str:
    """Letters of many scripts, marks, spaces and emoji."""
    dice = random.Random(seed)
    ranges = [(0x20, 0x7E), (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x5FF), (0x900, 0xDFF), (0x2000, 0x206F)]
    ranges += [(0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x1D400, 0x1D7FF), (0x1F300, 0x1FAFF)]
    return "".join(chr(dice.randint(*dice.choice(ranges))) for _ in range(length))


def code(lines: int = 1000) -> str:
    """About 20,000 tokens of Python, made up line by line."""
    dice = random.Random(7)
    names = ["index", "total", "request", "self.cache", "tokens_left", "HTTPError", "_parse", "window", "é_größe"]
    forms = [
        "def {a}({b}: int, *, {c}=None) -> dict[str, {d}]:",
        "    if {a} is not None and {b} >= 0x{n:x}:",
        '        raise ValueError(f"{{{a}!r}} is not {b}: {n:,} of {n}")',
        "    {a} = [{b} for {b} in {c}.items() if {d} != {n}.{n}e-3]",
        "        return {a}.{b}[{n}:-1] + {c} // 2  # {d}: see #{n}",
        "",
        '    """Return the {a} of {b}, or {n} where {c} has none."""',
        "\t@{a}.setter",
    ]
    out = []
    for _ in range(lines):
        picked = dict(zip("abcd", dice.choices(names, k=4), strict=True))
        out.append(dice.choice(forms).format(**picked, n=dice.randint(0, 99999)))
    return "\n".join(out)


def wire(body: Body, model: str) -> bytes:
    """A body as it is sent."""
    return json.dumps({"model": model, "max_tokens": 1, **body}).encode()
