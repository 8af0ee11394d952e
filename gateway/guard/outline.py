"""How the items of a history hang together: turns, what is dropped at once, and what is pinned."""

from __future__ import annotations

from gateway.history import Item, Role


class Outline:
    """How the items of a history hang together. Turns are counted by the assistant's runs: turn 0 is all before the
    first, and a run begins a turn to which all that follows up to the next run belongs.

    ``units`` are what is dropped at once, each in order: an assistant's run with the results of its calls, or any other
    single item. A result belongs to the latest call of its id, or else to the latest run: some clients give every call
    the same id.
    """

    __slots__ = ("inputs_from", "points", "turn_of", "typed", "unit_of", "units", "users")

    def __init__(self, items: tuple[Item, ...]) -> None:
        self.units: list[list[int]] = []
        self.unit_of: list[int] = []
        self.turn_of: list[int] = []
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

    def asked(self, end: int) -> list[int]:
        """The user's messages of ``items[:end]``: those a person typed, or any, if there are none."""
        return [index for index in self.typed if index < end] or [index for index in self.users if index < end]

    def pinned(self, items: tuple[Item, ...], end: int, turns: int, first_user: bool) -> set[int]:
        """What must stay of ``items[:end]`` whole: system messages; the latest typed user message; the first, if
        ``first_user``; what came in since the last answer; the newest ``turns`` turns; and all of a unit, if any of it.
        """
        users = self.asked(end)
        kept = {users[-1]} if users else set()
        if first_user:
            kept |= set(users[:1])
        since = self.inputs_from[end - 1]
        if since == end:  # it ends with the assistant, whose message is to be continued
            since = next(index for index in range(end) if self.turn_of[index] == self.turn_of[end - 1])
        oldest_turn = self.turn_of[end - 1] - turns + 1
        for index in range(end):
            newest = index >= since or (turns > 0 and self.turn_of[index] >= oldest_turn)
            if newest or items[index].role is Role.SYSTEM:
                kept.add(index)
        return {index for one in kept for index in self.units[self.unit_of[one]] if index < end}
