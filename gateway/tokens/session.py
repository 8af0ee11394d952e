"""One render of a resumable template: where each message's text begins, what it depended on, and where to start."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2.runtime import LoopContext
from jinja2.utils import Namespace

from gateway.tokens.resume import END, MARK, TAIL, Plan

NEVER = sys.maxsize
_SCALARS = (str, int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class Marks:
    """What a finished render knows of its loop, for the next one.

    ``before``: the text before the loop; ``entry``: values the loop found; ``items``: the messages it ran over and
    ``lists`` those it read from. Message i's text stays as it is while the first ``needs[i]`` messages do (and those of
    all before it). ``states[i]``: what the loop had written to namespaces before message i.
    """

    before: str
    entry: tuple[Any, ...]
    items: Sequence[Any]
    lists: tuple[Sequence[Any], ...]
    needs: Sequence[int]
    states: Sequence[tuple[dict[str, Any], ...] | None]


class Session:
    """Collects the pieces of one render. ``known`` and ``restarts``: an earlier render and where it may be resumed.

    After the render ``start`` is the message from which on it was rendered (0: all), ``pieces[: at[0]]`` is the text
    before the loop, ``pieces[at[i] : at[i + 1]]`` that of message ``start + i``, ``pieces[at[-1] :]`` what follows.
    ``entered`` is false if the loop was never reached or cannot be resumed later; ``at`` is then of no use.
    """

    def __init__(self, plan: Plan, known: Marks | None = None, restarts: Sequence[bool] = ()) -> None:
        self.pieces: list[str] = []
        self.at: list[int] = []
        self.start = 0
        self.entered = False
        self._plan = plan
        self._known = known
        self._restarts = restarts
        self._inside = False
        self._reach = 0
        self._before = ""
        self._entry: tuple[Any, ...] = ()
        self._items: Sequence[Any] = ()
        self._lists: tuple[Sequence[Any], ...] = ()
        self._needs: list[int] = []
        self._states: list[tuple[dict[str, Any], ...] | None] = []
        self._namespaces: list[Namespace] = []

    def run(self, pieces: Iterable[str]) -> None:
        """Render. One piece after the other, since the calls out of the template ask how many there are."""
        keep = self.pieces.append
        for piece in pieces:
            keep(piece)

    @property
    def marks(self) -> Marks:
        """For the next render."""
        return Marks(self._before, self._entry, self._items, self._lists, self._needs, self._states)

    # Called out of the template

    def tail(self, items: Any, lists: list[Any], captured: list[Any], namespaces: list[Any]) -> Any:
        """The loop begins: what it will run over."""
        try:
            entry = tuple(map(_frozen, captured))
        except _NotFrozen:
            return items
        # One that the loop makes for itself is not there yet, and gone with each message.
        namespaces = [each for each in namespaces if not isinstance(each, jinja2.Undefined)]
        if (
            not isinstance(items, list)
            or any(type(each) is not TrackedMessages for each in lists)
            or any(type(each) is not Namespace for each in namespaces)
        ):
            return items
        self.entered = self._inside = True
        self._before, self._entry = "".join(self.pieces), entry
        self._items, self._lists, self._namespaces = list(items), tuple(list(each) for each in lists), namespaces
        self.start = self._first_to_render()
        if self.start and self._known is not None:
            self._needs = list(self._known.needs[: self.start])
            self._states = list(self._known.states[: self.start])
            for namespace, state in zip(namespaces, self._known.states[self.start] or (), strict=True):
                _attributes(namespace).clear()
                _attributes(namespace).update(state)
        return Tail(self._items, self.start)

    def mark(self) -> None:
        """A message begins."""
        if self.entered:
            self._close()
            self.at.append(len(self.pieces))
            self._states.append(_states(self._namespaces) if self._namespaces else ())

    def end(self) -> None:
        """The loop has ended."""
        if self.entered:
            self._close()
            self._inside = False
            self.at.append(len(self.pieces))

    def read(self, index: int) -> None:
        """An element of a list of messages was read."""
        if self._inside:
            need = index + 1 if index >= 0 else NEVER
            if need > self._reach:
                self._reach = need

    def _close(self) -> None:
        """The message before this point is rendered: note how many messages its text hangs on."""
        done = len(self._states)
        if done > len(self._needs):
            need = done + self._plan.lookahead
            if self._reach > need:
                need = self._reach
            if self._needs and self._needs[-1] > need:
                need = self._needs[-1]
            self._needs.append(need)
        self._reach = 0

    def _first_to_render(self) -> int:
        """How many messages' text may be taken from the known render."""
        known = self._known
        if known is None or known.before != self._before or known.entry != self._entry:
            return 0
        same = min(
            _same(ours, theirs)
            for ours, theirs in zip((self._items, *self._lists), (known.items, *known.lists), strict=True)
        )
        start = min(len(known.needs), len(self._restarts) - 1, len(self._items) - 1)
        while start > 0 and not (
            known.needs[start - 1] <= same
            and start < len(known.states)
            and known.states[start] is not None
            and self._restarts[start]
        ):
            start -= 1
        return max(0, start)


class TrackedMessages(list[Any]):
    """The messages, telling the session which of them the template reads one by one."""

    def __init__(self, messages: Iterable[Any], session: Session) -> None:
        super().__init__(messages)
        self._session = session

    def __getitem__(self, key: Any) -> Any:
        if type(key) is slice:
            return TrackedMessages(super().__getitem__(key), self._session)
        found = super().__getitem__  # an index beyond the end is a read as well: it may be there next time
        if type(key) is int:
            self._session.read(key)
        else:
            self._session.read(-1)
        return found(key)


class Tail(list[Any]):
    """All messages, of which a loop runs over those from ``start`` on."""

    def __init__(self, items: Sequence[Any], start: int) -> None:
        super().__init__(items)
        self.start = start

    def __iter__(self) -> Any:
        return iter(self[self.start :])


class TailLoop(LoopContext):  # type: ignore[misc]
    """The ``loop`` of a ``Tail``, which counts from where that starts."""

    def __init__(self, tail: Tail, undefined: type[jinja2.Undefined]) -> None:
        super().__init__(tail, undefined)
        if tail.start:
            self.index0 = tail.start - 1
            self._current = tail[tail.start - 1]


def loop_context(iterable: Any, undefined: type[jinja2.Undefined], *more: Any) -> LoopContext:
    """The ``loop`` of any loop."""
    return TailLoop(iterable, undefined) if type(iterable) is Tail else LoopContext(iterable, undefined, *more)


class _NotFrozen(Exception):
    """A value that cannot be compared with what it will be next time."""


def _frozen(value: Any) -> Any:
    """``value`` in a form that is equal only to that of an equal value: types and the order of keys count."""
    if isinstance(value, jinja2.Undefined):
        return ("undefined",)
    kind = type(value)
    if kind is float or kind in (dict, list, tuple):
        return (kind, repr(value))
    if kind in _SCALARS:
        return (kind, value)
    if kind is Namespace:
        return (kind, *((name, _frozen(item)) for name, item in _attributes(value).items()))
    if callable(value) and getattr(value, "__name__", "") in _FUNCTIONS:
        return ("function", value)
    raise _NotFrozen


# What templates find among their globals, free of side effects. ``Namespace`` and ``dict`` are classes.
_FUNCTIONS = frozenset({"_raise", "Namespace", "dict", "safe_range"})


def _states(namespaces: list[Namespace]) -> tuple[dict[str, Any], ...] | None:
    states = tuple(dict(_attributes(each)) for each in namespaces)
    scalar = all(type(value) in _SCALARS for state in states for value in state.values())
    return states if scalar else None


def _attributes(namespace: Namespace) -> dict[str, Any]:
    attributes: dict[str, Any] = object.__getattribute__(namespace, "_Namespace__attrs")
    return attributes


def _same(ours: Sequence[Any], theirs: Sequence[Any]) -> int:
    """How many first elements are the same objects."""
    length = min(len(ours), len(theirs))
    if all(map(operator.is_, ours, theirs)):
        return length
    return next(n for n, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one is not other)


def inputs(session: Session) -> Mapping[str, Any]:
    """The functions that the template calls."""
    return {TAIL: session.tail, MARK: session.mark, END: session.end}
