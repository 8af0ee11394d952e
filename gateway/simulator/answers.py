"""What a simulated model says: readable words of the real vocabulary, chosen by the prompt and the seed alone."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.simulator.engine import FinishReason
from gateway.simulator.options import Eos
from gateway.simulator.rendering import Renderer

_SENTENCE_WORDS = 12
_COMMON_IDS = 30000


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer decided beforehand, token by token. ``texts[i]`` is what token ``i`` adds to the visible text.

    ``stop_reason`` is the stop string that ended it, if one did. ``tool_call``: name and JSON arguments.
    """

    token_ids: tuple[int, ...]
    texts: tuple[str, ...]
    finish_reason: FinishReason
    stop_reason: str | None = None
    tool_call: tuple[str, str] | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the request says about its answer. ``budget_tokens`` is final; ``budget_given``: the client named one."""

    budget_tokens: int
    budget_given: bool
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    include_stop: bool = False


class Writer:
    """Writes answers. The same prompt, seed and choice index give the same answer."""

    def __init__(self, renderer: Renderer, *, seed: int, mean_output_tokens: int, eos: Eos) -> None:
        self._renderer = renderer
        self._seed = seed
        self._mean = mean_output_tokens
        self._eos = eos
        self._eos_id = renderer.eos_id
        vocabulary = renderer.vocabulary
        common = {token: value for token, value in vocabulary.items() if value < _COMMON_IDS}
        self._words = sorted(value for token, value in common.items() if re.fullmatch(r"[Ġ▁][a-z]{2,9}", token))
        if not self._words:  # no word-initial marks: say what can be said
            self._words = sorted(value for token, value in vocabulary.items() if re.fullmatch(r"[a-z]+", token))
        wanted = set(self._words)
        marks = {0x120: " ", 0x2581: " "}
        self._spelling = {value: token.translate(marks) for token, value in vocabulary.items() if value in wanted}
        self._full_stop = vocabulary.get(".")

    def write(self, prompt_token_ids: Sequence[int], wishes: Wishes, index: int = 0) -> Answer:
        """Words up to the budget, a natural end or a stop string, whichever comes first."""
        dice = self._dice(prompt_token_ids, index)
        natural = self._natural_length(dice, wishes)
        length = min(natural, wishes.budget_tokens)
        ids: list[int] = []
        texts: list[str] = []
        said = ""
        while len(ids) < length:
            last = len(ids) == natural - 1
            token, text = (self._eos_id, "") if last and self._eos_id is not None else self._word(dice, len(ids))
            assert token is not None
            ids.append(token)
            texts.append(text)
            if wishes.stop and len(ids) > wishes.min_tokens:
                said += text
                if hit := _first_stop(said, wishes.stop):
                    return _cut(ids, texts, *hit, include=wishes.include_stop)
            elif wishes.stop:
                said += text
        return Answer(tuple(ids), tuple(texts), "stop" if natural <= wishes.budget_tokens else "length")

    def call(self, prompt_token_ids: Sequence[int], tool: Mapping[str, Any], wishes: Wishes, index: int = 0) -> Answer:
        """A call of ``tool`` with made-up arguments that satisfy the required part of its schema."""
        function = tool["function"]
        dice = self._dice(prompt_token_ids, index)
        arguments = json.dumps(self._value(dice, function.get("parameters") or {"type": "object"}))
        ids = self._renderer.encode(arguments, add_special_tokens=False)
        texts = [self._renderer.decode([token]) for token in ids]
        if "".join(texts) != arguments:  # a character split over tokens: give the text with the first one
            texts = [arguments, *[""] * (len(ids) - 1)]
        kept = min(len(ids), wishes.budget_tokens)
        whole = kept == len(ids)
        if whole and self._eos_id is not None and kept < wishes.budget_tokens:
            ids, texts, kept = [*ids, self._eos_id], [*texts, ""], kept + 1
        said = "".join(texts[:kept])
        return Answer(
            tuple(ids[:kept]), tuple(texts[:kept]), "stop" if whole else "length", tool_call=(function["name"], said)
        )

    def vector(self, prompt_token_ids: Sequence[int], dimensions: int) -> list[float]:
        """A unit vector that depends on the tokens alone."""
        dice = self._dice(prompt_token_ids, 0)
        values = [dice.gauss(0.0, 1.0) for _ in range(dimensions)]
        norm = sum(value * value for value in values) ** 0.5
        return [value / norm for value in values]

    def _dice(self, prompt_token_ids: Sequence[int], index: int) -> random.Random:
        digest = hashlib.blake2b(f"{self._seed}/{index}/".encode(), digest_size=8)
        digest.update(b"".join(token.to_bytes(4, "little") for token in prompt_token_ids))
        return random.Random(int.from_bytes(digest.digest(), "little"))

    def _natural_length(self, dice: random.Random, wishes: Wishes) -> int:
        """Tokens after which the model would end by itself, its end-of-turn token included."""
        length = max(2, round(dice.expovariate(1 / self._mean)), wishes.min_tokens + 1)
        never = wishes.ignore_eos or self._eos == "never" or (self._eos == "unbounded" and wishes.budget_given)
        return wishes.budget_tokens + 1 if never else length

    def _word(self, dice: random.Random, position: int) -> tuple[int, str]:
        if self._full_stop is not None and position % _SENTENCE_WORDS == _SENTENCE_WORDS - 1:
            return self._full_stop, "."
        token = dice.choice(self._words)
        return token, self._spelling[token]

    def _value(self, dice: random.Random, schema: Mapping[str, Any]) -> Any:
        if "const" in schema:
            return schema["const"]
        if schema.get("enum"):
            return dice.choice(list(schema["enum"]))
        for key in ("anyOf", "oneOf", "allOf"):
            if schema.get(key):
                return self._value(dice, schema[key][0])
        kind = schema.get("type", "object" if "properties" in schema else "string")
        kind = kind[0] if isinstance(kind, list) and kind else kind
        if kind == "object":
            properties = schema.get("properties") or {}
            return {name: self._value(dice, properties.get(name) or {}) for name in schema.get("required") or ()}
        if kind == "array":
            count = int(schema.get("minItems", 1))
            return [self._value(dice, schema.get("items") or {}) for _ in range(min(count, 8))]
        if kind in ("integer", "number"):
            return int(schema.get("minimum", 1))
        if kind == "boolean":
            return True
        return None if kind == "null" else self._spelling[dice.choice(self._words)].strip()


def _first_stop(said: str, stops: Sequence[str]) -> tuple[int, str] | None:
    hits = [(position, stop) for stop in stops if (position := said.find(stop)) >= 0]
    return min(hits) if hits else None


def _cut(ids: list[int], texts: list[str], position: int, stop: str, *, include: bool) -> Answer:
    """The answer up to (or with) the stop string; the tokens that made it are still counted."""
    room = position + (len(stop) if include else 0)
    shown = []
    for text in texts:
        shown.append(text[:room])
        room -= len(shown[-1])
    return Answer(tuple(ids), tuple(shown), "stop", stop)
