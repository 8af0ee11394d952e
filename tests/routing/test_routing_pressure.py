"""When caches are full: short requests first within limits, conversations stay where they are, shared blocks once."""

from __future__ import annotations

from typing import Any

from routing_views import NOW_S, backend, busy, kv, waiter

from gateway.config import PlacingSettings
from gateway.fleet.held import Held
from gateway.routing.placer import Placer
from gateway.routing.prefixes import thinned
from gateway.types import BackendView, Decision, KvView, Placed, Waiter

SETTINGS = PlacingSettings(headroom_ratio=0.0, short_first_s=60.0)
LONG = ((1, 1600), (2, 3200), (3, 6400))


def placer_of(*views: BackendView, settings: PlacingSettings = SETTINGS) -> Placer:
    placer = Placer(settings)
    placer.see(views)
    return placer


def placed(decisions: list[Decision]) -> list[tuple[int, str]]:
    return [(item.sequence, item.offer.backend) for item in decisions if isinstance(item, Placed)]


def late(sequence: int, *names: str, tokens: int = 160, **fields: Any) -> Waiter:
    return waiter(sequence, *names, tokens=tokens, arrived_s=NOW_S, deadline_s=NOW_S + 300, **fields)


def test_a_short_request_goes_before_a_long_one_that_came_first() -> None:
    placer = placer_of(busy("a", 1000))
    placer.add(late(1, "a", tokens=8000), NOW_S)
    placer.add(late(2, "a", tokens=160), NOW_S)
    placer.see([busy("a", 500)])
    assert placed(placer.decide(NOW_S + 1)) == [(2, "a")]


def test_but_not_before_one_that_was_let_in_already_where_its_backend_failed() -> None:
    placer = placer_of(busy("a", 1000))
    placer.decide(NOW_S)
    placer.add(late(1, "a", tokens=8000, tag=0.0), NOW_S)
    placer.add(late(2, "a", tokens=160), NOW_S)
    placer.see([busy("a", 500)])
    assert placed(placer.decide(NOW_S + 1)) == [(1, "a")]


def test_nobody_is_held_back_for_longer_than_the_operator_wants() -> None:
    placer = placer_of(busy("a", 1000))
    placer.add(late(1, "a", tokens=8000), NOW_S)
    for number in range(2, 5):
        placer.add(late(number, "a", tokens=160), NOW_S)
    assert placer.next_deadline_s() == NOW_S + 60
    placer.decide(NOW_S + 60)
    placer.see([busy("a", 500)])
    assert placed(placer.decide(NOW_S + 61))[0] == (1, "a")


def test_those_held_back_too_long_and_the_others_get_as_much_of_it() -> None:
    placer = placer_of(busy("a", 1000))
    for number in (1, 2):
        placer.add(late(number, "a", tokens=1600), NOW_S)
    placer.decide(NOW_S + 60)
    for number in range(3, 23):
        placer.add(late(number, "a", tokens=160), NOW_S + 60)
    order = []
    for step in range(4):
        placer.see([busy("a", 900)])
        order += [sequence for sequence, _ in placed(placer.decide(NOW_S + 61 + step / 100))]
    assert order == [1, *range(3, 13), 2, *range(13, 23)]


def test_without_a_time_for_it_requests_keep_to_their_turn() -> None:
    placer = placer_of(busy("a", 1000), settings=PlacingSettings(headroom_ratio=0.0, short_first_s=0.0))
    placer.add(late(1, "a", tokens=8000), NOW_S)
    placer.add(late(2, "a", tokens=160), NOW_S)
    placer.see([busy("a", 495)])
    assert placed(placer.decide(NOW_S + 1)) == [(1, "a")]


def test_what_is_cached_makes_a_request_short() -> None:
    placer = placer_of(busy("a", 0), busy("b", 1000))
    placer.add(late(1, "a", tokens=6400, model="m", chain=LONG), NOW_S)
    placer.see([busy("a", 1000)])
    placer.add(late(2, "a", tokens=3200), NOW_S)
    placer.add(late(3, "a", tokens=6416, model="m", chain=LONG), NOW_S)
    placer.see([busy("a", 500)])
    assert placed(placer.decide(NOW_S + 1))[0] == (3, "a")


def full_home_and_room_elsewhere(**elsewhere: Any) -> Placer:
    """``a`` has the conversation and is full; ``b`` has room."""
    placer = placer_of(busy("a", 0), busy("b", 999))
    assert placed(placer.add(late(1, "a", "b", tokens=6400, model="m", chain=LONG), NOW_S)) == [(1, "a")]
    placer.see([busy("a", 1000), busy("b", 100, **elsewhere)])
    return placer


def test_a_conversation_waits_for_the_backend_that_has_it() -> None:
    placer = full_home_and_room_elsewhere(in_flight=20)
    assert placed(placer.add(late(2, "a", "b", tokens=6416, model="m", chain=LONG), NOW_S)) == []
    placer.see([busy("a", 100)])
    assert placed(placer.decide(NOW_S + 0.1)) == [(2, "a")]


def test_and_goes_elsewhere_when_that_takes_too_long() -> None:
    placer = full_home_and_room_elsewhere(in_flight=20)
    placer.add(late(2, "a", "b", tokens=6416, model="m", chain=LONG), NOW_S)
    until_s = placer.next_deadline_s()
    assert until_s is not None
    # A quarter of what prefilling there would cost it and the twenty others, at 8,000 tokens a second.
    assert abs(until_s - NOW_S - 0.25 * 6400 / 8000 * 21) < 0.1
    assert placed(placer.decide(until_s - 0.01)) == []
    assert placed(placer.decide(until_s)) == [(2, "b")]


def test_meanwhile_it_holds_up_nobody_elsewhere() -> None:
    placer = full_home_and_room_elsewhere(in_flight=20)
    placer.add(late(2, "a", "b", tokens=6416, model="m", chain=LONG), NOW_S)
    assert placed(placer.add(late(3, "a", "b", tokens=8000), NOW_S)) == [(3, "b")]


def test_it_waits_but_a_moment_beside_an_idle_backend() -> None:
    placer = full_home_and_room_elsewhere(in_flight=0, running=0, kv=kv(0))
    placer.add(late(2, "a", "b", tokens=6416, model="m", chain=LONG), NOW_S)
    assert placed(placer.decide(NOW_S + 0.25 * 6400 / 8000 + 0.01)) == [(2, "b")]


def test_it_does_not_wait_for_a_backend_that_is_gone() -> None:
    placer = full_home_and_room_elsewhere(in_flight=20)
    placer.add(late(2, "a", "b", tokens=6416, model="m", chain=LONG), NOW_S)
    placer.see([backend("a", draining=True)])
    assert placed(placer.decide(NOW_S + 0.01)) == [(2, "b")]


def test_blocks_that_others_hold_already_are_not_needed_again() -> None:
    held = Held(16)
    held.take(thinned(LONG, "m"))
    shared = KvView(1000, 1000, 16, 900, 900, 0.5, held)
    placer = placer_of(busy("a", 0))
    placer.add(late(1, "a", tokens=6400, model="m", chain=LONG), NOW_S)
    placer.see([busy("a", 0, kv=shared)])
    # 401 blocks for itself, of which 400 are there.
    assert placed(placer.add(late(2, "a", tokens=6416, model="m", chain=LONG), NOW_S)) == [(2, "a")]
    assert placed(placer.add(late(3, "a", tokens=6416), NOW_S)) == []


def test_of_a_backend_that_comes_back_only_so_much_is_filled() -> None:
    placer = placer_of(busy("a", 90, warmth=0.1))
    assert placed(placer.add(late(1, "a", tokens=320), NOW_S)) == []
    placer.see([busy("a", 90, warmth=0.2)])
    assert placed(placer.decide(NOW_S + 1)) == [(1, "a")]
