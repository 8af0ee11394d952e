"""The usage that a client is told, where that is not what the backend counted: untrimmed, or scaled to its window.

Clients that compact only by the usage of the last answer (Claude Code, older Cline, Roo, Codex) take a window of their
own for granted. Scaled by that window over the true one, usage makes them compact when the true window is full.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import orjson

_PROMPT = ("prompt_tokens", "input_tokens")
_OUTPUT = ("completion_tokens", "output_tokens")
_CACHED = ("cache_read_input_tokens", "cache_creation_input_tokens")
_DETAILS = ("prompt_tokens_details", "input_tokens_details", "completion_tokens_details", "output_tokens_details")


@dataclass(frozen=True, slots=True)
class UsageTold:
    """``added_prompt_tokens``: what was trimmed off the prompt. ``factor`` then multiplies all counts, rounded up."""

    added_prompt_tokens: int = 0
    factor: float = 1.0

    @property
    def is_true(self) -> bool:
        """Whether usage is told as the backend counted it."""
        return not self.added_prompt_tokens and self.factor == 1.0

    def told(self, usage: dict[str, Any]) -> dict[str, Any]:
        """``usage`` of any dialect as the client is to see it; what is no number stays."""
        told = dict(usage)
        for name in (*_PROMPT, *_OUTPUT, *_CACHED):
            if _is_count(told.get(name)):
                added = self.added_prompt_tokens if name in _PROMPT else 0
                told[name] = self._scaled(told[name] + added)
        for name in _DETAILS:
            if isinstance(told.get(name), dict):
                told[name] = {
                    key: self._scaled(value) if _is_count(value) else value for key, value in told[name].items()
                }
        if _is_count(told.get("total_tokens")):
            told["total_tokens"] = sum(told[name] for name in (*_PROMPT, *_OUTPUT) if _is_count(told.get(name)))
        return told

    def tell(self, document: dict[str, Any]) -> bool:
        """Put the usage to be told into ``document``, wherever its dialect has it. Whether there was any."""
        found = False
        for holder in (document, document.get("response"), document.get("message")):
            if isinstance(holder, dict) and isinstance(holder.get("usage"), dict):
                holder["usage"] = self.told(holder["usage"])
                found = True
        return found

    def tell_in(self, body: bytes) -> bytes:
        """``body``, the JSON of a whole answer, with the usage to be told."""
        if self.is_true:
            return body
        document = orjson.loads(body)
        return orjson.dumps(document) if isinstance(document, dict) and self.tell(document) else body

    def _scaled(self, tokens: int) -> int:
        return math.ceil(tokens * self.factor)


TRUE = UsageTold()


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
