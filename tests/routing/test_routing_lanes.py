"""The queue's order: classes strictly, flows fairly, within a flow by arrival; and what was decided stays decided."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from routing_views import NOW_S, backend, kv, waiter

from gateway.config import PlacingSettings
from gateway.routing.assign import assign
from gateway.routing.placer import Placer
from gateway.types import BackendView, Decision, Need, Placed, Waiter

SETTINGS = PlacingSettings(headroom_ratio=0.0, short_first_s=0.0)


class World:
    """Backends that hold what is placed until it is released, and the placer in front of them."""

    def __init__(self, *names: str, blocks: int = 100) -> None:
        self.held: dict[str, dict[int, Need]] = {name: {} for name in names}
        self.blocks = blocks
        self.placer = Placer(SETTINGS)
        self.waiting: dict[int, Waiter] = {}
        self.placed: list[int] = []
        self.now_s = NOW_S
        self.down: set[str] = set()
        self.placer.see(self.views().values())

    def views(self) -> dict[str, BackendView]:
        return {name: self.view(name) for name in self.held}

    def view(self, name: str) -> BackendView:
        held = self.held[name]
        reserved = sum(need.blocks(16) for need in held.values())
        fields: dict[str, Any] = {"kv": kv(reserved, self.blocks), "in_flight": len(held), "running": len(held)}
        if name in self.down:
            fields["draining"] = True
        return backend(name, **fields)

    def arrive(self, request: Waiter) -> None:
        self.waiting[request.sequence] = request
        self.carry_out(self.placer.add(request, self.now_s))

    def leave(self, sequence: int) -> None:
        if self.waiting.pop(sequence, None) is not None:
            self.placer.remove(sequence)
            self.carry_out(self.placer.decide(self.now_s))

    def release(self, sequence: int) -> None:
        for name, held in self.held.items():
            if held.pop(sequence, None) is not None:
                self.see(name)

    def drain(self, name: str) -> None:
        self.down ^= {name}
        self.see(name)

    def see(self, name: str) -> None:
        self.placer.see([self.view(name)])
        self.carry_out(self.placer.decide(self.now_s))

    def carry_out(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            request = self.waiting.pop(decision.sequence)
            if isinstance(decision, Placed):
                name = decision.offer.backend
                self.held[name][request.sequence] = request.need(name)
                self.placed.append(request.sequence)
        self.placer.see(self.views().values())


def test_no_class_is_served_while_one_before_it_waits() -> None:
    world = World("a")
    world.arrive(waiter(1, "a", tokens=1600))
    for sequence, rank in ((2, 2), (3, 1), (4, 0), (5, 0), (6, 1)):
        world.arrive(waiter(sequence, "a", tokens=1600, rank=rank))
    for sequence in (1, 4, 5, 3, 6):
        world.release(sequence)
    assert world.placed == [1, 4, 5, 3, 6, 2]


def test_a_low_class_does_not_slip_past_a_high_one_that_is_too_large_for_now() -> None:
    world = World("a")
    world.arrive(waiter(1, "a", tokens=800))
    world.arrive(waiter(2, "a", tokens=1600, rank=0))
    world.arrive(waiter(3, "a", tokens=16, rank=2))
    assert world.placed == [1]
    world.leave(2)
    assert world.placed == [1, 3]


def test_flows_take_turns_however_many_requests_one_of_them_has_sent() -> None:
    world = World("a")
    world.arrive(waiter(0, "a", tokens=1600, flow="flood"))
    for sequence in range(1, 30):
        world.arrive(waiter(sequence, "a", tokens=1600, flow="flood"))
    world.arrive(waiter(100, "a", tokens=1600, flow="one"))
    world.arrive(waiter(101, "a", tokens=1600, flow="one"))
    world.arrive(waiter(200, "a", tokens=1600, flow="two"))
    for _ in range(6):
        world.release(world.placed[-1])
    assert sorted(world.placed[1:4]) == [1, 100, 200]
    assert set(world.placed[4:6]) == {2, 101}


def test_flows_share_tokens_not_requests() -> None:
    world = World("a")
    world.arrive(waiter(0, "a", tokens=1600, flow="x"))
    for number in range(10):
        world.arrive(waiter(100 + number, "a", tokens=1600, flow="long"))
        for part in range(10):
            world.arrive(waiter(1000 + 10 * number + part, "a", tokens=160, flow="short"))
    for _ in range(40):
        while world.held["a"]:
            world.release(next(iter(world.held["a"])))
            if len(world.placed) > 34:
                break
    long = sum(1600 for sequence in world.placed[:34] if 100 <= sequence < 1000)
    short = sum(160 for sequence in world.placed[:34] if sequence >= 1000)
    assert abs(long - short) <= 2 * 1600


def test_a_flow_saves_nothing_up_while_it_is_away() -> None:
    world = World("a")
    for sequence in range(20):
        world.arrive(waiter(sequence, "a", tokens=1600, flow="steady"))
    for _ in range(10):
        world.release(world.placed[-1])
    for sequence in range(100, 110):
        world.arrive(waiter(sequence, "a", tokens=1600, flow="back"))
    before = len(world.placed)
    for _ in range(6):
        world.release(world.placed[-1])
    assert sum(sequence >= 100 for sequence in world.placed[before:]) == 3


def test_what_left_unserved_is_not_held_against_its_flow() -> None:
    world = World("a")
    world.arrive(waiter(0, "a", tokens=1600))
    for sequence in range(1, 50):
        world.arrive(waiter(sequence, "a", tokens=1600, flow="fickle"))
    world.arrive(waiter(50, "a", tokens=1600, flow="fickle"))
    world.arrive(waiter(100, "a", tokens=1600, flow="other"))
    world.arrive(waiter(101, "a", tokens=1600, flow="other"))
    for sequence in range(1, 50):
        world.leave(sequence)
    for _ in range(3):
        world.release(world.placed[-1])
    assert set(world.placed[1:3]) == {50, 100}


def test_two_lanes_earn_no_second_share() -> None:
    """One flow asks for both backends in turn and for each alone; the other only for one of them."""
    world = World("a", "b")
    for sequence in range(60):
        names = (("a", "b"), ("a",), ("b",))[sequence % 3]
        world.arrive(waiter(sequence, *names, tokens=1600, flow="greedy"))
    for sequence in range(100, 130):
        world.arrive(waiter(sequence, "a", tokens=1600, flow="plain"))
    before = len(world.placed)
    for _ in range(20):
        world.release(next(iter(world.held["a"])))
    on_a = world.placed[before:]
    assert sum(sequence >= 100 for sequence in on_a) >= 9


def test_a_request_that_failed_elsewhere_keeps_its_place() -> None:
    world = World("a")
    world.arrive(waiter(1, "a", tokens=1600))
    for sequence in (5, 6):
        world.arrive(waiter(sequence, "a", tokens=1600))
    world.arrive(waiter(2, "a", "b", tokens=1600, excluded=frozenset({"b"}), tag=0.0))
    world.release(1)
    assert world.placed == [1, 2]


def test_a_request_that_waits_in_its_old_place_once_more_is_still_one() -> None:
    """A full backend refused it, perhaps more than once: its place is the very same."""
    world = World("a", blocks=10)
    world.arrive(waiter(1, "a", tokens=160))
    request = waiter(2, "a", tokens=160, tag=5.0)
    for _ in range(3):
        world.arrive(request)
        world.leave(2)
    world.arrive(request)
    world.release(1)
    world.carry_out(world.placer.decide(world.now_s))
    assert world.placed == [1, 2]
    assert len(world.placer) == 0


def test_one_flooding_key_takes_no_more_than_its_share() -> None:
    """Virtual time: a key floods, four others send one request after the other. Jain's index over their tokens."""
    world = World("a", "b", blocks=400)
    sequence = 0
    served: dict[str, int] = dict.fromkeys(("flood", "k1", "k2", "k3", "k4"), 0)
    outstanding = dict.fromkeys(served, 0)
    flow_of: dict[int, tuple[str, int]] = {}

    def send(flow: str, tokens: int) -> None:
        nonlocal sequence
        sequence += 1
        flow_of[sequence] = (flow, tokens)
        outstanding[flow] += 1
        world.arrive(waiter(sequence, "a", "b", tokens=tokens, flow=flow))

    for _ in range(1000):
        send("flood", 800)
    seen = 0
    ends: dict[int, int] = {}
    for tick in range(4000):
        for flow in served:
            if flow != "flood" and outstanding[flow] < 4:
                send(flow, 400 + 400 * (tick % 3))
        for number in world.placed[seen:]:
            ends[number] = tick + 5 + number % 7
        seen = len(world.placed)
        for number in [number for number, end in ends.items() if end <= tick]:
            del ends[number]
            flow, tokens = flow_of[number]
            outstanding[flow] -= 1
            if tick > 100 and outstanding["flood"] > 50:
                served[flow] += tokens
            world.release(number)
    shares = list(served.values())
    jain = sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))
    assert jain >= 0.95, served


steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("arrive"),
            st.sampled_from([("a",), ("b",), ("a", "b"), ("b", "c"), ("a", "b", "c")]),
            st.integers(1, 1700),
        ),
        st.tuples(st.just("release"), st.integers(0, 5)),
        st.tuples(st.just("leave"), st.integers(0, 5)),
        st.tuples(st.just("drain"), st.sampled_from("abc")),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(steps)
def test_step_by_step_is_decided_as_all_at_once(script: list[tuple[Any, ...]]) -> None:
    """What the placer remembers never changes a decision: after every step a fresh one would place nobody more."""
    world = World("a", "b", "c")
    sequence = 0
    for step in script:
        if step[0] == "arrive":
            sequence += 1
            world.arrive(waiter(sequence, *step[1], tokens=step[2]))
        elif step[0] == "release":
            holders = sorted(number for held in world.held.values() for number in held)
            if holders:
                world.release(holders[step[1] % len(holders)])
        elif step[0] == "leave":
            if world.waiting:
                world.leave(sorted(world.waiting)[step[1] % len(world.waiting)])
        else:
            world.drain(step[1])
        assert assign(list(world.waiting.values()), world.views(), NOW_S, SETTINGS) == []
        assert len(world.placer) == len(world.waiting)
        for held in world.held.values():
            assert len(held) <= 1 or sum(need.blocks(16) for need in held.values()) <= world.blocks


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 1600), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
)
def test_nobody_starves_inside_a_class_whatever_new_flows_come(prompts: list[int], chance: Any) -> None:
    """Every turn a flow nobody has seen before sends a request; those that were there first are served all the same."""
    world = World("a")
    world.arrive(waiter(0, "a", tokens=1600))
    for number, tokens in enumerate(prompts, 1):
        world.arrive(waiter(number, "a", tokens=tokens, flow=chance.choice("xy")))
    old = set(range(1, len(prompts) + 1))
    for turn in range(60 * (len(prompts) + 1)):
        world.arrive(waiter(1000 + turn, "a", tokens=chance.randint(1, 1600), flow=f"new {turn}"))
        if world.held["a"]:
            world.release(chance.choice(sorted(world.held["a"])))
        if old <= set(world.placed):
            return
    raise AssertionError(f"{sorted(old - set(world.placed))} never placed")
