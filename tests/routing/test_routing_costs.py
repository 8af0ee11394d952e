"""The cheapest room, and the one worth waiting for, are those of the rules spelled out, whatever is not looked at."""

from __future__ import annotations

from math import inf
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from routing_views import backend, offer

from gateway.fleet.held import Held
from gateway.routing.costs import LEAST_SAVED_S, MOST_PATIENCE_S, PATIENCE, Bonds, Full, cheapest, home
from gateway.routing.entries import Option
from gateway.routing.keeping import Keeper
from gateway.routing.rooms import FULL_S, Room
from gateway.types import KvView, Need

LINK_TOKENS = 160
# What others hold, and what the request is: the numbers of a prompt's links, of which two prompts share the first ones.
chains = st.lists(st.integers(0, 1), max_size=5).map(
    lambda path: tuple((hash(tuple(path[: end + 1])), (end + 1) * LINK_TOKENS) for end in range(len(path)))
)


@st.composite
def rooms_of(draw: st.DrawFn, first: int) -> list[Room]:
    """A few backends in any state, many of them alike, so that costs are often equal."""
    rooms: list[Room] = []
    for number in range(draw(st.integers(1, 5))):
        size = draw(st.sampled_from([16, 16, 32]))
        held = Held(size)
        for chain in draw(st.lists(chains, max_size=3)):
            held.take(chain)
        capacity = draw(st.sampled_from([60, 100]))
        kv = KvView(
            capacity, capacity, size, 0, draw(st.integers(0, capacity + 10)), 0.0, draw(st.sampled_from([held, None]))
        )
        fields: dict[str, Any] = {
            "kv": kv,
            "in_flight": draw(st.integers(0, 2)),
            "accepting": draw(st.sampled_from([True, True, True, False])),
            "pending_prompt_tokens": draw(st.sampled_from([0, 0, 1000])),
            "prefill_s": draw(st.sampled_from([None, 0.0005, 0.002])),
            "share": draw(st.sampled_from([1.0, 1.0, 0.5])),
        }
        room = Room(f"b{first + number}", 1 << (first + number))
        room.update(backend(room.name, **fields), draw(st.sampled_from([0.0, 0.1])))
        rooms.append(room)
    return rooms


@st.composite
def scenes(draw: st.DrawFn) -> tuple[tuple[Option, ...], Bonds, int]:
    """Options of some tiers, what ties the request to their rooms, and which of them are claimed."""
    chain = draw(chains)
    prompt_tokens = (chain[-1][1] if chain else 0) + draw(st.integers(1, 300))
    options: list[Option] = []
    rooms: list[Room] = []
    for tier in sorted(draw(st.lists(st.integers(0, 1), min_size=1, max_size=3))):
        some = draw(rooms_of(len(rooms)))
        rooms += some
        mask = sum(room.bit for room in some)
        need = Need(prompt_tokens, draw(st.sampled_from([0, 200])))
        offers = tuple(offer(room.name) for room in some)
        penalty_s, mixed = draw(st.sampled_from([0.0, 0.5])), draw(st.sampled_from([False, False, False, True]))
        places = {room.bit: place for place, room in enumerate(some)}
        options.append(Option(offers, places, need, tuple(some), mask, penalty_s, tier, mixed))
    bits = [room.bit for room in rooms]
    tokens = st.one_of(st.sampled_from([tokens for _, tokens in chain] or [50]), st.integers(1, prompt_tokens + 10))
    matched = draw(st.dictionaries(st.sampled_from(bits), tokens))
    extra_s = draw(st.dictionaries(st.sampled_from(bits), st.sampled_from([0.3, 3.0, -0.001])))
    claimed = draw(st.one_of(st.just(0), st.sets(st.sampled_from(bits)).map(sum)))
    return tuple(options), Bonds(matched, extra_s, chain), claimed


def blocks_of(room: Room, option: Option, bonds: Bonds) -> int:
    """Blocks the request takes there beyond those that others hold."""
    blocks = option.need.blocks(room.size)
    if room.held is not None and bonds.matched.get(room.bit):
        links = room.held.shared_links(bonds.chain)
        blocks -= bonds.chain[links - 1][1] // room.size if links else 0
    return blocks


def price(room: Room, option: Option, bonds: Bonds) -> float:
    """Seconds it costs there, infinitely many if it does not fit."""
    blocks = blocks_of(room, option, bonds)
    if blocks <= room.spare:
        full_s = room.barrier_s / (room.rest - blocks)
    elif room.drips:
        full_s = FULL_S
    else:
        return inf
    tokens = max(0, option.need.prompt_tokens - bonds.matched.get(room.bit, 0))
    work_s = room.base_s + tokens * room.work_s + option.need.output_tokens * room.output_s
    return work_s + full_s + option.penalty_s + bonds.extra_s.get(room.bit, 0.0)


def plainly_cheapest(options: tuple[Option, ...], claimed: int, bonds: Bonds) -> tuple[Option, Room] | None:
    """The rules, one room after the other."""
    for tier in sorted({option.tier for option in options}):
        best: tuple[Option, Room] | None = None
        best_s = inf
        for option in [option for option in options if option.tier == tier]:
            free = [room for room in option.rooms if not room.bit & claimed]
            if option.mixed:
                fitting = [
                    room
                    for room in free
                    if room.open and (room.idle or room.reserved + option.need.blocks(room.size) <= room.limit)
                ]
                free = sorted(fitting, key=lambda room: room.in_flight)[:1]
            for room in free:
                cost_s = room.base_s + option.penalty_s if option.mixed else price(room, option, bonds)
                if cost_s < best_s:
                    best, best_s = (option, room), cost_s
        if best is not None:
            return best
    return None


def plain_home(
    options: tuple[Option, ...], chosen: tuple[Option, Room] | None, bonds: Bonds
) -> tuple[int, float] | None:
    """The rules of waiting for a full room that has the prompt."""
    full: list[tuple[float, float, int]] = []
    there: tuple[float, float, int] | None = None
    for option in options:
        if option.tier != options[0].tier or option.mixed:
            continue
        for room in option.rooms:
            work_s = max(0, option.need.prompt_tokens - bonds.matched.get(room.bit, 0)) * room.work_s
            this = (room.base_s + work_s + option.penalty_s, work_s, room.bit)
            if chosen is not None and room is chosen[1]:
                there = this
            elif room.open and not room.drips and blocks_of(room, option, bonds) > room.spare:
                full.append(this)
    full.sort()
    others = [there] if there is not None else full[1:2]
    if not full or not others or others[0] < full[0]:
        return None
    saved_s = others[0][1] - full[0][1]
    return (full[0][2], min(MOST_PATIENCE_S, PATIENCE * saved_s)) if saved_s >= LEAST_SAVED_S else None


@given(scenes())
def test_the_cheapest_room_is_that_of_the_rules(scene: tuple[tuple[Option, ...], Bonds, int]) -> None:
    options, bonds, claimed = scene
    assert cheapest(options, claimed, Keeper(), bonds) == plainly_cheapest(options, claimed, bonds)
    free = Bonds({}, {})
    assert cheapest(options, claimed, Keeper()) == plainly_cheapest(options, claimed, free)


@given(scenes())
def test_the_room_worth_waiting_for_is_that_of_the_rules(scene: tuple[tuple[Option, ...], Bonds, int]) -> None:
    options, bonds, _ = scene
    full: Full = []
    chosen = cheapest(options, 0, Keeper(), bonds, full)
    assert home(options, chosen, bonds, full) == plain_home(options, chosen, bonds)
