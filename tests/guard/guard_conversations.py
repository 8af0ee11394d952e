"""Random conversations of people, models and tools, written in each of the three dialects."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.api import chat, messages, responses
from gateway.types import Ask, Dialect

PARSERS = {Dialect.CHAT: chat.parse, Dialect.RESPONSES: responses.parse, Dialect.MESSAGES: messages.parse}
PICTURE = "data:image/png;base64,iVBORw0KGgo="


@dataclass(frozen=True)
class Call:
    """A tool call and what came of it."""

    id: str
    arguments: str
    result: str
    picture: bool


@dataclass(frozen=True)
class Step:
    """One answer of the model: what it thought, said, and called."""

    thoughts: str
    said: str
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Turn:
    """A question and the answers up to the next."""

    question: str
    picture: bool
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Talk:
    """A conversation."""

    system: str
    turns: tuple[Turn, ...]


def words(source: random.Random, most: int) -> str:
    count = source.randrange(1, most)
    lines = [f"w{source.randrange(1000)}" for _ in range(count)]
    return "".join(word + source.choice((" ", " ", " ", "\n")) for word in lines).strip()


def turn(seed: int, number: int) -> Turn:
    """The turn that ``seed`` stands for."""
    source = random.Random(seed)
    steps = []
    for step in range(source.choice((0, 0, 0, 1, 2, 5))):
        calls = []
        for call in range(source.choice((1, 1, 1, 2))):
            # Some clients number the calls of every answer from nought again.
            name = f"call_{call}" if seed % 5 == 0 else f"call_{number}_{step}_{call}"
            size = source.choice((5, 40, 400, 2000))
            calls.append(Call(name, json.dumps({"q": words(source, 9)}), words(source, size), source.random() < 0.1))
        thoughts = words(source, 120) if source.random() < 0.5 else ""
        steps.append(Step(thoughts, words(source, 100) if source.random() < 0.5 else "", tuple(calls)))
    steps.append(Step(words(source, 120) if source.random() < 0.5 else "", words(source, 60), ()))
    return Turn(words(source, source.choice((8, 50, 200))), source.random() < 0.2, tuple(steps))


def talk(seeds: Sequence[int]) -> Talk:
    """The conversation that ``seeds`` stand for, a turn each; the first also draws the system prompt."""
    source = random.Random(seeds[0])
    system = words(source, 150) if seeds[0] % 4 else ""
    return Talk(system, tuple(turn(seed, number) for number, seed in enumerate(seeds)))


def requests(conversation: Talk, dialect: Dialect) -> list[dict[str, Any]]:
    """The bodies a client sends over the conversation, one for each answer of the model."""
    writer = {Dialect.CHAT: _Chat, Dialect.RESPONSES: _Responses, Dialect.MESSAGES: _Messages}[dialect](conversation)
    bodies = []
    for each in conversation.turns:
        writer.question(each)
        for step in each.steps:
            bodies.append(writer.body())
            writer.answer(step)
            if step.calls:
                writer.results(step.calls)
    return bodies


def ask(body: Mapping[str, Any], dialect: Dialect) -> Ask:
    return PARSERS[dialect](json.dumps(body).encode(), "application/json")


class _Chat:
    def __init__(self, conversation: Talk) -> None:
        self.list: list[dict[str, Any]] = []
        if conversation.system:
            self.list.append({"role": "system", "content": conversation.system})

    def body(self) -> dict[str, Any]:
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        return {"model": "m", "tools": [tool], "messages": list(self.list)}

    def question(self, each: Turn) -> None:
        content: Any = each.question
        if each.picture:
            content = [{"type": "text", "text": each.question}, {"type": "image_url", "image_url": {"url": PICTURE}}]
        self.list.append({"role": "user", "content": content})

    def answer(self, step: Step) -> None:
        message: dict[str, Any] = {"role": "assistant", "content": step.said or None}
        if step.thoughts:
            message["reasoning_content"] = step.thoughts
        if step.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": "f", "arguments": call.arguments}}
                for call in step.calls
            ]
        self.list.append(message)

    def results(self, calls: Sequence[Call]) -> None:
        for call in calls:
            content: Any = call.result
            if call.picture:
                content = [{"type": "text", "text": call.result}, {"type": "image_url", "image_url": {"url": PICTURE}}]
            self.list.append({"role": "tool", "tool_call_id": call.id, "content": content})


class _Responses:
    def __init__(self, conversation: Talk) -> None:
        self.list: list[dict[str, Any]] = []
        self.system = conversation.system

    def body(self) -> dict[str, Any]:
        tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
        return {"model": "m", "instructions": self.system, "tools": [tool], "input": list(self.list)}

    def question(self, each: Turn) -> None:
        content: list[dict[str, Any]] = [{"type": "input_text", "text": each.question}]
        if each.picture:
            content.append({"type": "input_image", "image_url": PICTURE})
        self.list.append({"type": "message", "role": "user", "content": content})

    def answer(self, step: Step) -> None:
        if step.thoughts:
            said = [{"type": "reasoning_text", "text": step.thoughts}]
            self.list.append({"type": "reasoning", "summary": [], "content": said})
        if step.said:
            content = [{"type": "output_text", "text": step.said}]
            self.list.append({"type": "message", "role": "assistant", "content": content})
        for call in step.calls:
            self.list.append({"type": "function_call", "call_id": call.id, "name": "f", "arguments": call.arguments})

    def results(self, calls: Sequence[Call]) -> None:
        for call in calls:
            self.list.append({"type": "function_call_output", "call_id": call.id, "output": call.result})


class _Messages:
    def __init__(self, conversation: Talk) -> None:
        self.list: list[dict[str, Any]] = []
        self.system = conversation.system

    def body(self) -> dict[str, Any]:
        body = {"model": "m", "max_tokens": 64, "tools": [{"name": "f", "input_schema": {"type": "object"}}]}
        if self.system:
            body["system"] = self.system
        return {**body, "messages": list(self.list)}

    def question(self, each: Turn) -> None:
        content: list[dict[str, Any]] = [{"type": "text", "text": each.question}]
        if each.picture:
            source = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
            content.append({"type": "image", "source": source})
        self.list.append({"role": "user", "content": content})

    def answer(self, step: Step) -> None:
        blocks: list[dict[str, Any]] = []
        if step.thoughts:
            blocks.append({"type": "thinking", "thinking": step.thoughts, "signature": "s"})
        if step.said:
            blocks.append({"type": "text", "text": step.said})
        blocks += [
            {"type": "tool_use", "id": call.id, "name": "f", "input": json.loads(call.arguments)} for call in step.calls
        ]
        self.list.append({"role": "assistant", "content": blocks})

    def results(self, calls: Sequence[Call]) -> None:
        blocks = []
        for call in calls:
            content: Any = call.result
            if call.picture:
                source = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
                content = [{"type": "text", "text": call.result}, {"type": "image", "source": source}]
            blocks.append({"type": "tool_result", "tool_use_id": call.id, "content": content})
        self.list.append({"role": "user", "content": blocks})
