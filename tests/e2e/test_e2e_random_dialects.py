"""Whatever Responses or Messages request the server takes, its prompt tokens are known beforehand."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import httpx2
import pytest
from e2e_backends import Backends
from e2e_cases import CODE
from e2e_dialect_cases import BILLING, CUSTOM, FUNCTION, HOSTED, PATCH, SPACE, STRICT, TOOL, Body
from e2e_processes import PLAIN

from gateway.api import messages, responses
from gateway.relay.sse import json_usage
from gateway.tokens.local import TemplateOptions, load

REQUESTS = 30


class Dice:
    """Items, blocks and bodies put together at random."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)

    def text(self) -> str:
        start = self._dice.randrange(len(CODE) - 300)
        code = CODE[start : start + self._dice.randrange(200)]
        return self._dice.choice([code, code, "日本 é 👩\u200d👧", "", " \n", "<|im_end|>", f"{BILLING}\nrest"])

    def responses(self) -> Body:
        items = [self._item() for _ in range(self._dice.randrange(1, 9))]
        body: Body = {"input": [*items, {"role": "user", "content": self.text() + "."}]}
        if self._dice.random() < 0.4:
            body["instructions"] = self.text()
        if self._dice.random() < 0.6:
            body["tools"] = self._dice.sample([FUNCTION, STRICT, CUSTOM, SPACE, *HOSTED], self._dice.randrange(4))
        if self._dice.random() < 0.3:
            body["reasoning"] = {"effort": self._dice.choice(["none", "low", "high"])}
        return body

    def _item(self) -> Any:
        text = {"type": "input_text", "text": self.text()}
        said = [{"type": "output_text", "text": self.text(), "annotations": []} for _ in range(2)]
        call = {"type": "function_call", "name": "weather", "call_id": f"c{self._dice.randrange(9)}"}
        output = {"type": "function_call_output", "call_id": "c1"}
        return self._dice.choice(
            [
                {"role": "user", "content": self.text()},
                {"type": "message", "role": "user", "content": [text, text]},
                {"role": self._dice.choice(["system", "developer"]), "content": self.text()},
                {"type": "message", "role": "assistant", "content": said},
                {"role": "assistant", "content": self.text()},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": self.text()}]},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": self.text()}]},
                {**call, "arguments": json.dumps({"city": self.text()})},
                {**call, "arguments": "{broken"},
                {**call, "arguments": "{}", "namespace": "crm"},
                {**output, "output": self.text()},
                {**output, "output": [text, text]},
                PATCH,
            ]
        )

    def messages(self) -> Body:
        turns = []
        for _ in range(self._dice.randrange(1, 8)):
            role = self._dice.choice(["user", "assistant", "user", "assistant", "system"])
            blocks = [self._block(role) for _ in range(self._dice.randrange(4))]
            turns.append({"role": role, "content": self.text() if self._dice.random() < 0.3 else blocks})
        body: Body = {"messages": [*turns, {"role": "user", "content": "go"}]}
        if self._dice.random() < 0.5:
            body["system"] = [{"type": "text", "text": text} for text in (self.text(), BILLING, self.text())]
        if self._dice.random() < 0.6:
            body["tools"] = self._dice.sample([TOOL, {**TOOL, "name": "m", "strict": True}], self._dice.randrange(3))
        if self._dice.random() < 0.3:
            body["thinking"] = {"type": self._dice.choice(["disabled", "adaptive"])}
        return body

    def _block(self, role: str) -> Body:
        text: Body = {"type": "text", "text": self.text()}
        result: Body = {"type": "tool_result", "tool_use_id": "t1"}
        of_user = [{**result, "content": self.text()}, {**result, "content": [text, text]}, {**result, "content": None}]
        of_assistant = [
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"a": self.text(), "b": [1.5, None]}},
            {"type": "thinking", "thinking": self.text(), "signature": "s"},
            {"type": "redacted_thinking", "data": "eA=="},
        ]
        others: list[Body] = {"user": of_user, "assistant": of_assistant}.get(role, [])
        return self._dice.choice([text, text, *others])


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_random_requests_have_the_prompt_tokens_we_count(backends: Backends, model_folder: Path, path: str) -> None:
    local = load(str(model_folder), TemplateOptions(), hub=False, cache_bytes=1 << 20)
    dice = Dice(1)
    served = 0
    with httpx2.Client(base_url=backends.large.url, timeout=60, **PLAIN) as client:
        for _ in range(REQUESTS):
            made = dice.responses() if path == "/v1/responses" else dice.messages()
            budget = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
            body = json.dumps({"model": backends.model, budget: 1, **made}).encode()
            answer = client.post(path, content=body, headers={"content-type": "application/json"})
            if answer.status_code == 400:
                continue
            ask = (responses if path == "/v1/responses" else messages).parse(body, "application/json")
            assert ask.prompt is not None, body
            assert local.count(ask.prompt, {})[0] == json_usage(answer.content)[0], body
            served += 1
    assert served > 0.9 * REQUESTS
