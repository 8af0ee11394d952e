"""Room is kept for conversations that are about to return: as much as is worth it, for as long, and nobody starves."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_talk import TALKED_TOKENS, a_pass, back, late, no_passes, placed, talk, talking
from routing_views import NOW_S, backend, busy, kv

from gateway.config import PlacingSettings
from gateway.routing.keeping import LEAST_NEW_TOKENS, LOOK_AGAIN_S, PASS_EVERY
from gateway.routing.lanes import Lane
from gateway.routing.placer import Placer
from gateway.types import BackendView, Placed, Refused

COLD = 3200  # 200 blocks
ROOM = 600  # blocks reserved that leave 400: enough for a cold prompt, not for 300 kept beside it
TIGHT = 650  # 350 left


def test_a_prompt_that_is_not_cached_leaves_room_to_those_who_are_likely_back() -> None:
    placer = talking()
    assert placer.kept_blocks(NOW_S) == {"a": 300}
    placer.see([busy("a", ROOM)])
    assert placer.add(late(1, "a", tokens=COLD), NOW_S) == []
    assert placer.kept_out() == 1
    placer.see([busy("a", 500)])
    assert placed(placer.decide(NOW_S)) == [(1, "a")]
    assert placer.kept_out() == 0


def test_who_returns_passes_it() -> None:
    placer = talking()
    placer.see([busy("a", 501)])
    placer.add(late(1, "a", tokens=COLD), NOW_S)
    assert placed(placer.add(back(2, "a"), NOW_S)) == [(2, "a")]
    assert placer.kept_out() == 1


def test_it_goes_in_by_time_alone_once_they_stay_away() -> None:
    placer = talking()
    placer.see([busy("a", ROOM)])
    placer.add(late(1, "a", tokens=COLD), NOW_S)
    now_s, decisions = NOW_S, []
    while not decisions:
        at_s = placer.next_deadline_s()
        assert at_s is not None and now_s < at_s <= now_s + LOOK_AGAIN_S
        now_s = at_s
        decisions = placer.decide(now_s)
    assert placed(decisions) == [(1, "a")]
    assert 30 < now_s - NOW_S < 40  # of 800 blocks left there 90 % were likely to be used again, and less than 200 now
    assert placer.next_deadline_s() is None


def test_now_and_then_one_is_let_in_all_the_same() -> None:
    placer = talking()
    a_pass(placer, "a", NOW_S)
    placer.see([busy("a", ROOM)])
    assert placed(placer.add(late(1, "a", tokens=COLD), NOW_S)) == [(1, "a")]
    placer.see([busy("a", ROOM)])
    assert placed(placer.add(late(2, "a", tokens=COLD), NOW_S)) == []
    again_s = NOW_S + PASS_EVERY * COLD / 8000  # the first one's prompt takes 0.4 s
    assert placed(placer.decide(again_s - 0.01)) == []
    assert placed(placer.decide(again_s + LOOK_AGAIN_S)) == [(2, "a")]


def test_who_needs_no_room_of_others_costs_nobody_that() -> None:
    placer = talking()
    a_pass(placer, "a", NOW_S)
    placer.see([busy("a", 500)])
    assert placed(placer.add(late(1, "a", tokens=COLD), NOW_S)) == [(1, "a")]
    placer.see([busy("a", ROOM)])
    assert placed(placer.add(late(2, "a", tokens=COLD), NOW_S)) == [(2, "a")]


@pytest.mark.parametrize(("reserved", "reason"), [(ROOM, "kept_out"), (990, "timeout")])
def test_whose_time_is_over_is_told_whether_it_would_have_fitted(reserved: int, reason: str) -> None:
    placer = talking()
    placer.see([busy("a", reserved)])
    placer.add(late(1, "a", tokens=COLD, deadline_s=NOW_S + 5), NOW_S)
    assert placer.decide(NOW_S + 5) == [Refused(1, reason)]


def test_the_room_is_theirs_again_when_they_return_and_leave_again() -> None:
    placer = talking()
    now_s = NOW_S + 60
    placer.see([busy("a", ROOM)])
    assert placed(placer.add(back(1, "a"), now_s)) == [(1, "a")]
    placer.left("a", 12 * TALKED_TOKENS, now_s)
    placer.see([busy("a", ROOM)])
    assert placer.add(late(2, "a", tokens=COLD), now_s) == []


def test_nothing_is_kept_where_every_prompt_is_a_new_one() -> None:
    placer = talking(turns=0)
    assert placer.kept_blocks(NOW_S) == {"a": 0}
    placer.see([busy("a", ROOM)])
    assert placed(placer.add(late(1, "a", tokens=COLD), NOW_S)) == [(1, "a")]


@pytest.mark.parametrize("fields", [{"caches": False}, {"keep_ratio": 0.0}])
def test_nothing_is_kept_without_prefix_caching_or_if_the_operator_wants_none(fields: dict[str, Any]) -> None:
    placer = talking(**fields)
    assert placer.kept_blocks(NOW_S) == {"a": 0}
    placer.see([busy("a", ROOM, caches=fields.get("caches", True))])
    assert placed(placer.add(late(1, "a", tokens=COLD), NOW_S)) == [(1, "a")]


def test_of_a_cache_that_is_not_known_nothing_is_told() -> None:
    placer = Placer(PlacingSettings())
    placer.see([busy("a", 0, kv=None)])
    assert placer.kept_blocks(NOW_S) == {}
    placer.left("a", 5000, NOW_S)
    assert placed(placer.add(late(1, "a", tokens=COLD), NOW_S)) == [(1, "a")]


def test_a_backend_with_nothing_to_do_takes_it_at_once() -> None:
    placer = talking()
    placer.see([backend("a", kv=kv(ROOM))])
    assert placed(placer.add(late(1, "a", tokens=COLD), NOW_S)) == [(1, "a")]


def test_and_when_it_becomes_idle_while_somebody_is_kept_out() -> None:
    placer = talking()
    placer.see([busy("a", ROOM)])
    placer.add(late(1, "a", tokens=COLD), NOW_S)
    placer.see([backend("a", kv=kv(ROOM))])
    assert placed(placer.decide(NOW_S)) == [(1, "a")]


def test_it_goes_to_another_backend_where_nobody_is_expected() -> None:
    placer = talking("b")
    placer.see([busy("a", ROOM), busy("b", ROOM, in_flight=20)])
    assert placed(placer.add(late(1, "a", "b", tokens=COLD), NOW_S)) == [(1, "b")]


def test_a_prompt_with_next_to_nothing_to_compute_goes_in() -> None:
    placer = talking()
    placer.see([busy("a", ROOM + 200)])
    assert placed(placer.add(late(1, "a", tokens=LEAST_NEW_TOKENS - 1), NOW_S)) == [(1, "a")]
    placer.see([busy("a", ROOM + 200)])
    assert placer.add(late(2, "a", tokens=LEAST_NEW_TOKENS), NOW_S) == []


@pytest.mark.parametrize(("reserved", "goes"), [(100, True), (101, False)])
def test_a_prompt_that_takes_most_of_the_cache_needs_half_of_the_rest_beside_it(reserved: int, goes: bool) -> None:
    placer = talking()
    placer.see([busy("a", reserved)])
    assert bool(placer.add(late(1, "a", tokens=800 * 16), NOW_S)) == goes


def test_of_a_prompt_that_is_cached_in_part_only_a_part_is_asked() -> None:
    placer = talking()
    placer.see([busy("a", ROOM)])
    half = late(1, "a", tokens=COLD, model="m", chain=(talk(0)[0], (7, COLD)))
    assert placed(placer.add(half, NOW_S)) == [(1, "a")]  # 200 blocks beside 150 instead of 300


def test_whose_turn_has_come_is_let_in() -> None:
    placer = talking(short_first_s=5.0)
    placer.see([busy("a", ROOM)])
    placer.add(late(1, "a", tokens=COLD), NOW_S)
    assert placer.decide(NOW_S + 4.9) == []
    assert placer.kept_out() == 1
    assert placed(placer.decide(NOW_S + 5)) == [(1, "a")]


def test_a_restart_of_the_backend_forgets_what_was_left_there() -> None:
    placer = talking()
    placer.see([busy("a", ROOM)])
    placer.add(late(1, "a", tokens=COLD), NOW_S)
    placer.see([busy("a", ROOM, epoch=1)])
    assert placed(placer.decide(NOW_S)) == [(1, "a")]
    assert placer.kept_blocks(NOW_S) == {"a": 0}


def test_a_smaller_prompt_behind_it_that_is_not_cached_either_waits_too() -> None:
    placer = talking("b")
    placer.see([busy("a", 501)])
    assert placed(placer.add(late(1, "a", tokens=COLD - 16), NOW_S)) == [(1, "a")]  # alone it would go in
    placer.see([busy("a", 501)])
    placer.add(late(2, "a", tokens=COLD), NOW_S)
    assert placer.add(late(3, "a", "b", tokens=COLD - 16), NOW_S) == []
    assert placer.kept_out() == 2
    placer.remove(2)
    assert placed(placer.decide(NOW_S)) == [(3, "a")]


def test_nor_does_it_get_in_where_nothing_is_kept() -> None:
    placer = talking("b")
    placer.see([busy("a", ROOM), busy("b", 1000, caches=False)])
    placer.add(late(1, "a", "b", tokens=COLD), NOW_S)
    placer.see([busy("b", 1000 - 199, caches=False)])
    assert placer.add(late(2, "b", tokens=COLD - 16), NOW_S) == []


def test_who_returns_passes_it_from_behind() -> None:
    placer = talking("b")
    placer.see([busy("a", TIGHT)])
    placer.add(late(1, "a", "b", tokens=LEAST_NEW_TOKENS), NOW_S)
    request = back(2, "a", more=LEAST_NEW_TOKENS - 4)
    assert placed(placer.add(request, NOW_S)) == [(2, "a")]
    assert [entry.waiter.sequence for entry in placer._entries.values()] == [1]


@pytest.mark.parametrize(("rank", "passes"), [(1, True), (2, False)])
def test_but_no_lower_class_passes_it(rank: int, passes: bool) -> None:
    placer = talking("b")
    placer.see([busy("a", ROOM)])
    placer.add(late(1, "a", tokens=COLD, rank=1), NOW_S)
    assert bool(placer.add(back(2, "a", "b", rank=rank), NOW_S)) == passes
    placer.remove(1)
    assert bool(placer.decide(NOW_S)) != passes


def test_who_was_held_up_by_a_claim_is_looked_at_when_one_who_is_kept_out_goes_before_it() -> None:
    placer = talking("b")
    placer.see([busy("a", TIGHT)])
    # It does not fit and claims the backend, before a small one that would.
    placer.add(back(1, "a", more=LEAST_NEW_TOKENS + 6, output=2000, flow="f"), NOW_S)
    assert placer.add(late(2, "a", "b", tokens=LEAST_NEW_TOKENS - 4, flow="f"), NOW_S) == []
    decisions = placer.add(late(3, "a", tokens=LEAST_NEW_TOKENS, flow="g"), NOW_S)
    assert placed(decisions) == [(2, "a")]


def test_of_who_is_kept_out_and_leaves_nothing_stays() -> None:
    placer = talking()
    placer.see([busy("a", ROOM)])
    placer.add(late(1, "a", tokens=COLD), NOW_S)
    placer.remove(1)
    assert (placer.kept_out(), placer.next_deadline_s()) == (0, None)
    placer.see([busy("a", 1000)])
    placer.add(late(2, "a", tokens=COLD, arrived_s=NOW_S + 50), NOW_S + 50)
    assert placer.next_deadline_s() == NOW_S + 50 + PlacingSettings().short_first_s


def test_who_is_kept_out_by_one_backend_and_waits_for_another_alone_is_not_kept_out_there() -> None:
    placer = talking("b", "c")
    placer.see([busy("a", ROOM), busy("b", 0)])
    conversation = ((1001, 3200), (1002, 6400))
    assert placed(placer.add(late(1, "b", tokens=6400, model="m", chain=conversation), NOW_S)) == [(1, "b")]
    placer.see([busy("a", 599), busy("b", 1000), busy("c", 0, in_flight=20)])
    assert placer.add(late(2, "a", "b", "c", tokens=6400, model="m", chain=conversation), NOW_S) == []
    assert placer.kept_out() == 0  # it waits for b, which is full


@pytest.mark.parametrize(("short_first_s", "tag"), [(0.0, None), (300.0, 0.0)])
def test_whose_turn_it_is_when_it_comes_leaves_no_room_and_goes_in_at_once(
    short_first_s: float, tag: float | None
) -> None:
    """Nobody is held back for short ones, or it was let in before, by a backend that failed."""
    placer = talking(short_first_s=short_first_s)
    placer.see([busy("a", ROOM)])
    assert placed(placer.add(late(1, "a", tokens=COLD, tag=tag), NOW_S)) == [(1, "a")]
    assert (placer.kept_out(), len(placer), placer.next_deadline_s()) == (0, 0, None)


def test_a_retry_does_not_count_as_a_return() -> None:
    placer = Placer(PlacingSettings(headroom_ratio=0.0))
    placer.see([busy("a", 0)])
    for attempt in range(4):
        tag = 0.0 if attempt else None
        (decision,) = placer.add(late(1, "a", tokens=COLD, model="m", chain=talk(0), tag=tag), NOW_S)
        assert isinstance(decision, Placed)
        placer.left("a", decision.own_tokens, NOW_S)
    assert placer.kept_blocks(NOW_S) == {"a": 0}


def test_nor_does_a_second_attempt_beside_the_first() -> None:
    placer = talking("b", turns=0)
    placer.see([busy("b", 0)])
    for number in range(8):
        new = ((7000 + number, COLD),)
        (first,) = placer.add(late(10 + number, "a", tokens=COLD, model="m", chain=new), NOW_S)
        request = late(20 + number, "a", "b", tokens=COLD, model="m", chain=new, excluded=frozenset({"a"}))
        (second,) = placer.add(request, NOW_S)
        assert placed([first, second]) == [(10 + number, "a"), (20 + number, "b")]
        for name in ("a", "b"):
            placer.left(name, COLD, NOW_S)
            placer.see([busy(name, 0)])
    assert placer.kept_blocks(NOW_S) == {"a": 0, "b": 0}


class Village:
    """Backends and a placer, whatever comes in whatever order; each look at the queue is checked."""

    def __init__(self, short_first_s: float, *names: str) -> None:
        self.names = names or ("a",)
        self.placer = Placer(PlacingSettings(headroom_ratio=0.0, short_first_s=short_first_s))
        self.now_s = NOW_S
        self.sequence = 0
        self.running: dict[int, tuple[Placed, int]] = {}
        self.waiting: dict[int, int] = {}  # sequence: conversation, -1 for a new prompt
        self.waited_s: dict[int, float] = {}
        self.arrived_s: dict[int, float] = {}
        self.look()

    def talk(self, conversations: int) -> None:
        """Conversations have some turns, one after the other."""
        for number in 4 * list(range(conversations)):
            self.returns(number)
            self.finish(0)

    def cold(self, tokens: int, offers: int = -1, rank: int = 1) -> int:
        return self._arrive(tokens, -1, offers, rank)

    def returns(self, conversation: int, more: int = 0, offers: int = -1, rank: int = 1) -> int:
        return self._arrive(TALKED_TOKENS + more, conversation, offers, rank)

    def finish(self, which: int) -> None:
        if self.running:
            sequence = sorted(self.running)[which % len(self.running)]
            gone, _ = self.running.pop(sequence)
            self.placer.left(gone.offer.backend, gone.own_tokens, self.now_s)
            self.look()

    def hang_up(self, which: int) -> None:
        if self.waiting:
            sequence = sorted(self.waiting)[which % len(self.waiting)]
            del self.waiting[sequence]
            self.placer.remove(sequence)
            self.look()

    def wait(self, time_s: float) -> None:
        """Time passes; the queue is looked at when it asks for it, and not oftener than each millisecond."""
        until_s = self.now_s + time_s
        while (at_s := self.placer.next_deadline_s()) is not None and at_s <= until_s:
            assert at_s > self.now_s
            self.now_s = at_s
            self.look()
        self.now_s = until_s

    def look(self) -> None:
        self.placer.see([self._view(name) for name in self.names])
        self._carry_out(self.placer.decide(self.now_s))
        if not any(entry.aged for entry in self.placer._entries.values()):  # whose turns change while they are served
            self.placer.see([self._view(name) for name in self.names])
            self.placer._better = -1
            again = self.placer.decide(self.now_s)
            assert not again, f"{again} could have been placed before"
        at_s = self.placer.next_deadline_s()
        assert at_s is None or at_s > self.now_s
        self.check()

    def check(self) -> None:
        placer = self.placer
        at_s = placer.next_deadline_s()
        assert len(placer) == len(self.waiting)
        assert (at_s is None) == (not self.waiting)
        assert 0 <= placer.kept_out() <= len(self.waiting)
        if placer.kept_out():
            assert at_s is not None and at_s <= self.now_s + LOOK_AGAIN_S
        assert all(0 <= kept <= 300 for kept in placer.kept_blocks(self.now_s).values())
        for entry in placer._entries.values():
            assert isinstance(entry.lane, Lane)
            for name in self.names:
                assert self._blocks(name) or not entry.lane.mask & placer._rooms[name].bit, f"{name} idles"

    def _view(self, name: str) -> BackendView:
        count = sum(gone.offer.backend == name for gone, _ in self.running.values())
        return backend(name, kv=kv(self._blocks(name)), in_flight=count, running=count)

    def _blocks(self, name: str) -> int:
        return sum(blocks for gone, blocks in self.running.values() if gone.offer.backend == name)

    def _arrive(self, tokens: int, conversation: int, offers: int, rank: int) -> int:
        self.sequence += 1
        self.waiting[self.sequence] = conversation
        self.arrived_s[self.sequence] = self.now_s
        chain = talk(conversation) if conversation >= 0 else ((-self.sequence, tokens),)
        request = late(
            self.sequence,
            *([name for place, name in enumerate(self.names) if offers >> place & 1] or self.names),
            rank=rank,
            tokens=tokens,
            model="m",
            chain=chain,
            flow=str(conversation),
            arrived_s=self.now_s,
            deadline_s=self.now_s + 1e6,
        )
        self._carry_out(self.placer.add(request, self.now_s))
        self.look()
        return self.sequence

    def _carry_out(self, decisions: list[Any]) -> None:
        for decision in decisions:
            assert isinstance(decision, Placed)
            del self.waiting[decision.sequence]
            self.waited_s[decision.sequence] = self.now_s - self.arrived_s[decision.sequence]
            self.running[decision.sequence] = (decision, decision.need.blocks(16))
        assert all(self._blocks(name) <= 1000 for name in self.names)


RANKS = st.sampled_from([0, 1, 1, 1, 2])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("cold"), st.integers(1, 15_000), st.integers(1, 7), RANKS),
        st.tuples(st.just("returns"), st.integers(0, 5), st.integers(0, 3000), st.integers(1, 7), RANKS),
        st.tuples(st.just("finish"), st.integers(0, 9)),
        st.tuples(st.just("hang_up"), st.integers(0, 9)),
        st.tuples(st.just("wait"), st.floats(0.0, 30.0)),
    ),
    min_size=10,
    max_size=60,
)


@given(STEPS, st.sampled_from([0.0, 10.0, 300.0]), st.integers(0, 10_000), st.sampled_from(["a", "ab", "abc"]))
@settings(max_examples=200, deadline=None)
def test_nobody_waits_for_ever_whatever_came_before(
    steps: list[tuple[Any, ...]], short_first_s: float, held_tokens: int, names: str
) -> None:
    village = Village(short_first_s, *names)
    village.talk(4)
    for place in range(len(names)):
        village.cold(held_tokens, 1 << place)
    for name, *arguments in steps:
        getattr(village, name)(*arguments)
    for _ in range(2 * len(steps) + 6):
        if not village.waiting:
            break
        village.wait(10.0)
        village.finish(0)
    assert not village.waiting
    assert (village.placer.kept_out(), village.placer.next_deadline_s()) == (0, None)


@given(st.integers(3300, 4700), st.integers(3, 6), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_nobody_waits_for_ever_for_conversations_that_never_stop(tokens: int, conversations: int, seed: int) -> None:
    village = Village(short_first_s=20.0)
    village.talk(conversations)
    village.cold(8000)  # it stays: what is left for the next is 500 blocks
    cold = 0
    for second in range(60):
        if second == 10:
            no_passes(village.placer)
            cold = village.cold(tokens)
        village.returns((seed >> second % 32) % conversations)
        village.wait(1.0)
        while len(village.running) > 1:
            village.finish(1)
    assert 5.0 < village.waited_s[cold] <= 21.0
