"""Where a request may go: the rooms behind its offers that stand, window by window. Pure.

The offers of most requests are those of others before them. So the rooms of a group of offers are kept as long as no
backend changes its windows, its cache or its being there.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, log2

from gateway.routing.costs import WINDOW_S
from gateway.routing.entries import Option
from gateway.routing.rooms import Room
from gateway.types import Group, Waiter

MOST_LAYOUTS = 512


class _Layout:
    """The rooms of one group of offers. ``places``: where in the group their offers are, by their bits."""

    __slots__ = ("holds_tokens", "mask", "mixed", "places", "rooms", "stands")

    def __init__(self, rooms: tuple[Room, ...], places: dict[int, int]) -> None:
        self.stands = bool(rooms)
        self.rooms = rooms
        self.places = places
        self.mask = sum([room.bit for room in rooms])
        self.mixed = not all(room.known for room in rooms)
        self.holds_tokens = min((room.holds_tokens for room in rooms), default=inf)


class Layouts:
    """The options of requests, by the rooms as they are now; ``clear`` it when they are others."""

    def __init__(self, rooms: Mapping[str, Room]) -> None:
        """``rooms`` by name, the caller's own: not copied."""
        self._rooms = rooms
        self._layouts: dict[tuple[object, ...], _Layout] = {}

    def __repr__(self) -> str:
        return f"<Layouts {len(self._layouts)} of {len(self._rooms)} backends>"

    def clear(self) -> None:
        """A backend came, went or changed what it offers."""
        self._layouts.clear()

    def options(self, waiter: Waiter) -> tuple[tuple[Option, ...], bool]:
        """Where the request may go, in order of preference, and whether any backend it has an offer of is there. If one
        is, and there is no option, the prompt is larger than any cache."""
        options: list[Option] = []
        stands = False
        tier = 0
        first_tokens = last_tokens = 0
        for group in waiter.groups:
            window_tokens = group.window_tokens
            if not first_tokens:
                first_tokens = window_tokens
            elif window_tokens < last_tokens or tier:
                tier += 1
            last_tokens = window_tokens
            layout = self._layout(group, waiter)
            stands = stands or layout.stands
            need = group.need
            if need.prompt_tokens > layout.holds_tokens:
                rooms = tuple(room for room in layout.rooms if need.prompt_tokens <= room.holds_tokens)
                layout = _Layout(rooms, layout.places)
            if layout.mask:
                penalty_s = WINDOW_S * log2(window_tokens / first_tokens) if not tier and first_tokens else 0.0
                options.append(
                    Option(
                        group.offers, layout.places, need, layout.rooms, layout.mask, penalty_s, tier, layout.mixed
                    )
                )  # fmt: skip
        return tuple(options), stands

    def _layout(self, group: Group, waiter: Waiter) -> _Layout:
        """The rooms of a group that are there and still serve the model with that window."""
        names = tuple([offer.backend for offer in group.offers])
        window_tokens = group.window_tokens
        key = (waiter.model, window_tokens, names, waiter.excluded)
        layout = self._layouts.get(key)
        if layout is None:
            rooms, places = [], {}
            for place, name in enumerate(names):
                room = self._rooms.get(name)
                if room is None or room.gone or name in waiter.excluded:
                    continue
                if room.serves(waiter.model, window_tokens) and room.bit not in places:
                    rooms.append(room)
                    places[room.bit] = place
            layout = _Layout(tuple(rooms), places)
            if len(self._layouts) >= MOST_LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = layout
        return layout
