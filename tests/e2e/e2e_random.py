"""Random chat requests with everything odd that clients send, the same for the same seed."""

from __future__ import annotations

import random
from typing import Any

_SCRAPS = [
    *("hi", "", "  ", "\n\n", "naïve café", "日本語テキスト", "👩‍👩‍👧‍👦 🇫🇷", "e\u0301\u0323", "مرحبا שלום", "𝔘𝔫𝔦"),
    *("<|im_start|>system\nx<|im_end|>", "<think>\na\n</think>\n\nb", "<tool_call>\n{}</tool_call>", "<|endoftext|>"),
    *(
        "def f(x):\n\treturn x\r\n",
        "\u00a0\u200b\ufeff",
        "1234567 3.14",
        " lead",
        "trail  ",
        '{"a": 1}',
        "x" * 50,
        "\x00\x07",
    ),
]
_ARGUMENTS = [
    *("{}", '{"a":1}', '{"b": [1, 2.50, null], "a": {"z": "\\u00e9"}}', "", "not json", "[]", "42", '"s"'),
    *('{"x": 1e5, "y": 12345678901234567890}', '{"é": "日本"}', '{"a":1,"a":2}', '{"n": NaN}'),
]
_PARAMETERS: list[Any] = [
    None,
    {},
    {
        "type": "object",
        "properties": {"q": {"type": "string", "description": "« é »"}, "n": {"minimum": 1.0}},
        "required": ["q"],
    },
    {"$schema": "x", "properties": {}, "type": "object"},
]
_KWARGS: list[dict[str, Any]] = [
    {"enable_thinking": False},
    {"enable_thinking": None},
    {"enable_thinking": "auto"},
    {"unknown": 1},
    {"add_generation_prompt": False},
    {"bos_token": "Z", "padding": True},
    {"documents": [{"title": "t", "text": "x"}]},
]


class RandomChats:
    """An endless source of request bodies, less the model."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"messages": self._messages()}
        if self._often(0.5):
            body["tools"] = [self._tool(number) for number in range(self._dice.randint(1, 3))]
            body |= self._dice.choice([{}, {}, {"tool_choice": "none"}, {"tool_choice": "auto"}])
        if self._often(0.15):
            body["reasoning_effort"] = self._dice.choice(["none", "low", "high"])
        if self._often(0.2):
            body["chat_template_kwargs"] = self._dice.choice(_KWARGS)
        if self._often(0.1):
            body["add_generation_prompt"] = False
            body["continue_final_message"] = self._often(0.5)
        if self._often(0.05):
            body["truncate_prompt_tokens"] = self._dice.choice([5, 50, 1000])
        return body

    def _often(self, share: float) -> bool:
        return self._dice.random() < share

    def _text(self) -> str:
        return "".join(self._dice.choice(_SCRAPS) for _ in range(self._dice.randint(0, 5)))

    def _content(self) -> Any:
        if self._often(0.6):
            return self._text()
        return [self._part() for _ in range(self._dice.randint(0, 3))]

    def _part(self) -> dict[str, Any]:
        part = {"type": "text", "text": self._text()}
        return {"cache_control": {"type": "ephemeral"}, **part} if self._often(0.2) else part

    def _shuffled(self, mapping: dict[str, Any]) -> dict[str, Any]:
        items = list(mapping.items())
        self._dice.shuffle(items)
        return dict(items)

    def _call(self, number: int) -> dict[str, Any]:
        function = {"name": self._dice.choice(["search", "f"]), "arguments": self._dice.choice(_ARGUMENTS)}
        call = {"id": f"call_{number}", "type": "function", "function": self._shuffled(function)}
        if self._often(0.3):
            call["index"] = number
        return self._shuffled(call)

    def _tool(self, number: int) -> dict[str, Any]:
        function: dict[str, Any] = {"name": f"tool_{number}"}
        if self._often(0.7):
            function["description"] = self._dice.choice([self._text(), None])
        if self._often(0.8):
            function["parameters"] = self._dice.choice(_PARAMETERS)
        if self._often(0.4):
            function["strict"] = self._dice.choice([True, False, None])
        if self._often(0.2):
            function["vendor"] = 5
        return self._shuffled({"type": "function", "function": self._shuffled(function)})

    def _assistant(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self._content()}
        if self._often(0.3):
            message[self._dice.choice(["reasoning", "reasoning_content"])] = self._dice.choice([self._text(), None])
        return message

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self._often(0.5):
            messages.append({"role": self._dice.choice(["system", "developer"]), "content": self._content()})
        for _ in range(self._dice.randint(1, 4)):
            messages.append({"role": "user", "content": self._content()})
            if self._often(0.35):
                messages.append(self._assistant())
            elif self._often(0.5):
                calls = [self._call(number) for number in range(self._dice.randint(1, 3))]
                content = self._dice.choice([None, "", self._text()])
                messages.append({"role": "assistant", "content": content, "tool_calls": calls})
                messages += [{"role": "tool", "tool_call_id": call["id"], "content": self._content()} for call in calls]
        if self._often(0.7):
            messages.append({"role": "user", "content": self._text() or "go"})
        return messages
