"""Random conversations as agents hold them: well formed, so that the strictest formats take them."""

from __future__ import annotations

import json
import random
from typing import Any

_WORDS = [
    "file",
    "total",
    "naïve",
    "日本語",
    "👍🏽",
    "e\u0301",
    "return x\n",
    "\n\n",
    "  ",
    "<|end|>",
    "[INST]",
    "<think>",
    "1234567",
]
_WORDS += ["</s>", "{'a': 1}", "<｜User｜>", "\t", "\u00a0", "http://a.b/c?d=e", "ну", "\u200d", "<|im_end|>", "café"]
_VALUES: list[Any] = [
    "x",
    "",
    "日本",
    1,
    2.5,
    True,
    None,
    [],
    [1, "a"],
    {"k": {"é": None}},
    "a\nb",
    "</｜DSML｜parameter>",
]


class AgentChats:
    """An endless source of request bodies, less the model; the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._calls = 0

    def body(self) -> dict[str, Any]:
        """One chat request."""
        messages: list[dict[str, Any]] = []
        if self._often(0.6):
            messages.append({"role": "system", "content": self._content()})
        for _ in range(self._dice.randint(0, 3)):
            messages.append({"role": "user", "content": self._content()})
            messages += self._work()
            messages.append(self._answer(self._text() or "Done."))
        messages.append({"role": "user", "content": self._content()})
        if self._often(0.3):
            messages += self._work()
        body: dict[str, Any] = {"messages": messages}
        if self._often(0.7):
            body["tools"] = [self._tool(number) for number in range(self._dice.randint(1, 4))]
        if self._often(0.2):
            body["reasoning_effort"] = self._dice.choice(["low", "medium", "high", "none", "max"])
        if messages[-1]["role"] == "user" and self._often(0.1):
            messages.append(self._answer(self._text() or "So"))
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        return body

    def _work(self) -> list[dict[str, Any]]:
        """Rounds of calls and their results."""
        messages = []
        for _ in range(self._dice.choice([0, 0, 1, 2])):
            calls = [self._call() for _ in range(self._dice.randint(1, 3))]
            asking = self._answer(self._dice.choice([None, "", self._text()]))
            messages.append({**asking, "tool_calls": calls})
            results = [{"role": "tool", "tool_call_id": call["id"], "content": self._content()} for call in calls]
            if self._often(0.2):
                self._dice.shuffle(results)
            messages += results
        return messages

    def _answer(self, content: str | None) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self._often(0.25):
            message[self._dice.choice(["reasoning", "reasoning_content"])] = self._text() or "Hm."
        return message

    def _call(self) -> dict[str, Any]:
        self._calls += 1
        arguments = {f"p{number}": self._dice.choice(_VALUES) for number in range(self._dice.randint(0, 3))}
        written = json.dumps(arguments, ensure_ascii=self._often(0.5), indent=self._dice.choice([None, None, 1]))
        function = {"name": f"tool_{self._dice.randint(0, 3)}", "arguments": written}
        identity = f"call{self._calls:05d}" if self._often(0.7) else f"chatcmpl-tool-call{self._calls:05d}"
        return {"id": identity, "type": "function", "function": function}

    def _tool(self, number: int) -> dict[str, Any]:
        kinds: list[Any] = ["string", "integer", "boolean", "array", "object", ["string", "null"]]
        properties: dict[str, Any] = {}
        for place in range(self._dice.randint(0, 4)):
            kind = self._dice.choice(kinds)
            schema: dict[str, Any] = {"type": kind}
            if self._often(0.6):
                schema["description"] = self._text()
            if kind == "string" and self._often(0.3):
                schema |= {"enum": ["a", "b c", "é"], "default": "a"}
            if kind == "array":
                schema["items"] = {"type": self._dice.choice(["string", "number"])}
            if kind == "object":
                schema["properties"] = {"inner": {"type": "string", "description": "x"}}
            properties[f"p{place}"] = schema
        parameters = {"type": "object", "properties": properties, "required": list(properties)[:1]}
        function = {"name": f"tool_{number}", "description": self._text(), "parameters": parameters}
        return {"type": "function", "function": function}

    def _content(self) -> Any:
        if self._often(0.8):
            return self._text() or "Hi"
        return [{"type": "text", "text": self._text() or "x"} for _ in range(self._dice.randint(1, 3))]

    def _text(self) -> str:
        return " ".join(self._dice.choice(_WORDS) for _ in range(self._dice.randint(0, 12)))

    def _often(self, share: float) -> bool:
        return self._dice.random() < share
