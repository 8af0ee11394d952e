"""How the items of a history hang together: turns, what is dropped at once, and what is pinned."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from gateway.history import Item, Role


class Outline:
    """How the items of a history hang together. Turns are counted by the assistant's runs: turn 0 is all before the
    first, and a run begins a turn to which all that follows up to the next run belongs.

    ``units`` are what is dropped at once, each in order: an assistant's run with the results of its calls, or any other
    single item. A result belongs to the latest call of its id, or else to the latest run: some clients give every call
    the same id.
    """

    __slots__ = ("inputs_from", "points", "turn_of", "turns_from", "typed", "unit_of", "units", "users")

    def __init__(self, items: tuple[Item, ...]) -> None:
        self.units: list[list[int]] = []
        self.unit_of: list[int] = []
        self.turn_of: list[int] = []
        self.turns_from: list[int] = [0]  # by turn: its first item
        self.inputs_from: list[int] = []  # by item: the first input after the latest run up to and with it
        self.points: list[int] = []  # ends of the prefixes that were requests of their own
        self.users: list[int] = []
        self.typed: list[int] = []
        callers: dict[str, int] = {}
        run = -1  # unit of the latest assistant's run
        turn = inputs_from = 0
        for index, item in enumerate(items):
            if item.role is Role.ASSISTANT:
                if index == 0 or items[index - 1].role is not Role.ASSISTANT:
                    if index:
                        self.points.append(index)
                    run, turn = self._unit(), turn + 1
                    self.turns_from.append(index)
                unit, inputs_from = run, index + 1
                callers |= dict.fromkeys(item.calls, run)
            elif item.role is Role.TOOL and run >= 0:
                unit = max((callers[call] for call in item.answers if call in callers), default=run)
            else:
                unit = self._unit()
            self.units[unit].append(index)
            self.unit_of.append(unit)
            self.turn_of.append(turn)
            self.inputs_from.append(inputs_from)
            if item.role is Role.USER:
                self.users.append(index)
                if item.typed:
                    self.typed.append(index)
        self.points.append(len(items))

    def _unit(self) -> int:
        self.units.append([])
        return len(self.units) - 1

    def asked(self, end: int) -> tuple[int, int] | None:
        """The user's first and latest message of ``items[:end]``: of those a person typed, or of any, if none is."""
        for users in (self.typed, self.users):
            number = bisect_left(users, end)
            if number:
                return users[0], users[number - 1]
        return None

    def pinned_units(
        self, items: tuple[Item, ...], alive: Iterable[int], end: int, turns: int, first_user: bool
    ) -> set[int]:
        """The units of which something must stay of ``items[:end]``, of which ``alive`` are not dropped: system
        messages; the latest typed user message; the first, if ``first_user``; what came in since the last answer; the
        newest ``turns`` turns.
        """
        asked = self.asked(end)
        kept = {self.unit_of[asked[1]]} if asked else set()
        if asked and first_user:
            kept.add(self.unit_of[asked[0]])
        since = self.inputs_from[end - 1]
        turn = self.turn_of[end - 1]
        if since == end:  # it ends with the assistant, whose message is to be continued
            since = self.turns_from[turn]
        if turns > 0:
            since = min(since, self.turns_from[max(0, turn - turns + 1)])
        kept |= {self.unit_of[index] for index in alive if index >= since or items[index].role is Role.SYSTEM}
        return kept
