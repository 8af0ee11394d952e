"""Whether coding clients take an answer for a context overflow, by the rules of ``overflow_rules.json``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("overflow_rules.json")


@dataclass(frozen=True)
class ClientRule:
    """How one client recognises an overflow in one dialect. ``within``: ``status`` or ``stream``."""

    client: str
    speaks: str
    within: str
    facts: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.client} ({self.speaks}, {self.within})"

    def sees(self, status: int, body: bytes) -> bool:
        """Whether it takes an answer of this status and body for an overflow."""
        facts = self.facts
        if status in facts.get("statuses_alone", ()):
            return True
        if "statuses" in facts and status not in facts["statuses"]:
            return False
        return self._sees_error(_error_in(json.loads(body)), body.decode())

    def sees_in_stream(self, stream: bytes) -> bool:
        """Whether one of the stream's events is an overflow to it."""
        return any(self._sees_event(document) for document in documents(stream))

    def _sees_event(self, document: dict[str, Any]) -> bool:
        if self.facts.get("event", document.get("type")) != document.get("type"):
            return False
        error = _error_in(document.get("response") if self.facts.get("event") == "response.failed" else document)
        return bool(error) and self._sees_error(error, json.dumps(document))

    def _sees_error(self, error: dict[str, Any], body: str) -> bool:
        facts = self.facts
        text = body if facts.get("reads") == "body" else str(error.get("message", ""))
        matches = self._matches(text, facts.get("patterns", ()))
        if facts.get("both"):
            return matches and error.get("type") in facts["types"]
        if error.get("code") in facts.get("codes", ()) or error.get("type") in facts.get("types", ()):
            return True
        if "larger" in facts:
            larger, smaller = (error.get(name, 0) for name in facts["larger"])
            matches = matches or larger > smaller
        return matches and not self._matches(text, facts.get("vetoes", ()))

    def _matches(self, text: str, patterns: Any) -> bool:
        flags = re.RegexFlag(0) if self.facts.get("case") else re.IGNORECASE
        return any(re.search(pattern, text, flags) for pattern in patterns)


@cache
def rules(speaks: str, within: str = "status") -> tuple[ClientRule, ...]:
    """The rules of the clients that speak a dialect. Those of the budget that is too large are no part of it."""
    found = json.loads(FILE.read_text(encoding="utf-8"))["rules"]
    return tuple(
        ClientRule(facts["client"], facts["speaks"], facts["in"], facts)
        for facts in found
        if facts["speaks"] == speaks and facts["in"] == within and "kind" not in facts
    )


def documents(stream: bytes) -> Iterator[dict[str, Any]]:
    """The JSON of each event of a stream."""
    for line in stream.decode().splitlines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def _error_in(document: Any) -> dict[str, Any]:
    error = document.get("error") if isinstance(document, dict) else None
    return error if isinstance(error, dict) else {}
