"""The clients that recognise a context overflow, by the dialect they speak. Each takes a status and a raw body."""

from __future__ import annotations

from collections.abc import Callable

from client_rules import rules

Sees = Callable[[int, bytes], bool]

CHAT_CLIENTS: dict[str, Sees] = {rule.client: rule.sees for rule in rules("chat")}
ANTHROPIC_CLIENTS: dict[str, Sees] = {rule.client: rule.sees for rule in rules("messages")}


def those_who_see_an_overflow(status: int, body: bytes, clients: dict[str, Sees] = CHAT_CLIENTS) -> set[str]:
    return {name for name, sees in clients.items() if sees(status, body)}
