"""Backends that begin to answer later than others, whatever the prompt: what it costs, how long it is believed."""

from __future__ import annotations

from typing import Any

import pytest
from routing_views import NOW_S, backend, waiter

from gateway.config import PlacingSettings
from gateway.routing.placer import Placer
from gateway.routing.rooms import PREFILL_S, Room, compare
from gateway.types import Health, Placed

SETTINGS = PlacingSettings(headroom_ratio=0.0)


def rooms(**fields: dict[str, Any]) -> dict[str, Room]:
    """Backends that were seen and compared."""
    made = {name: Room(name, 1 << number) for number, name in enumerate(fields)}
    for name, room in made.items():
        room.update(backend(name, **fields[name]), 0.0)
    compare(made.values())
    return made


def places(placer: Placer, count: int, tokens: int = 16) -> list[str]:
    """Where so many requests go, one after the other."""
    found = []
    for number in range(count):
        (decision,) = placer.add(waiter(1000 + number, "a", "b", tokens=tokens), NOW_S)
        assert isinstance(decision, Placed)
        found.append(decision.offer.backend)
    return found


def test_the_price_of_a_delay_is_what_it_is_longer_than_the_fastest() -> None:
    made = rooms(a={"first_s": 2.0}, b={"first_s": 0.1}, c={"first_s": 0.14})
    assert made["a"].base_s - made["b"].base_s == pytest.approx(2.0 - 1.5 * 0.1)
    assert made["b"].base_s == made["c"].base_s


def test_it_is_less_of_a_reason_the_more_work_a_backend_is_to_get() -> None:
    made = rooms(a={"first_s": 2.0, "share": 2.0}, b={"first_s": 2.0}, c={"first_s": 0.0})
    assert (made["a"].later_s, made["b"].later_s) == (1.0, 2.0)


@pytest.mark.parametrize("others", [{}, {"b": {"first_s": 2.5}}, {"b": {"first_s": 0.1, "health": Health.DOWN}}])
def test_who_is_as_late_as_all_others_is_not_late(others: dict[str, dict[str, Any]]) -> None:
    """A lone backend, one of several behind one slow proxy, and the only one that is up."""
    assert rooms(a={"first_s": 2.0}, **others)["a"].later_s == 0.0


def test_who_is_not_known_yet_may_be_the_fastest_and_is_tried() -> None:
    """One request after the other: of backends that cost the same always the first would be taken."""
    placer = Placer(SETTINGS)
    placer.see([backend("a"), backend("b")])
    assert places(placer, 1) == ["a"]
    placer.see([backend("a", first_s=0.6)])
    assert places(placer, 1) == ["b"]
    placer.see([backend("a", first_s=0.6), backend("b", first_s=0.7)])
    assert places(placer, 1) == ["a"]


def test_what_prompts_of_one_size_took_is_parted_by_the_rate_they_are_priced_with() -> None:
    made = rooms(
        a={"first_s": 4.0, "first_tokens": 8000.0},
        b={"first_s": 0.0, "prefill_s": 1 / 2000},
        c={"first_s": 5.0, "first_tokens": 8000.0},
    )
    assert made["a"].token_s == 1 / 2000
    assert (made["a"].later_s, made["c"].later_s) == (0.0, 1.0)
    made = rooms(a={"first_s": 4.0, "first_tokens": 8000.0}, b={"first_s": 1.0, "first_tokens": 8000.0})
    assert made["a"].token_s == PREFILL_S
    assert made["a"].later_s == 3.0


def test_requests_go_where_they_begin_sooner_until_that_is_too_busy() -> None:
    placer = Placer(SETTINGS)
    placer.see([backend("a", first_s=1.0), backend("b", first_s=0.05)])
    assert set(places(placer, 20)) == {"b"}
    assert "a" in places(placer, 20, tokens=1000)


def test_the_first_whose_pace_of_output_is_known_is_not_punished_for_it() -> None:
    placer = Placer(SETTINGS)
    placer.see([backend(name) for name in "abcdefgh"])
    placer.see([backend("a", output_s=0.1)])
    assert places(placer, 1) == ["a"]


def test_what_has_not_been_seen_for_long_is_believed_less_and_less() -> None:
    slow = {"first_s": 2.0, "prefill_s": 1 / 1000, "output_s": 0.1}
    fast = {"first_s": 0.1, "prefill_s": 1 / 9000, "output_s": 0.01}
    before = rooms(a=slow, b=fast)["a"]
    for trust in (0.5, 0.25, 0.125, 0.0625, 0.03125):
        made = rooms(a={**slow, "trust": trust}, b=fast)
        now = made["a"]
        assert now.token_s < before.token_s
        assert (now.later_s, now.output_s) < (before.later_s, before.output_s) or now.later_s == now.output_s == 0.0
        before = now
    assert (before.later_s, before.output_s) == (0.0, 0.0)
    assert before.token_s == pytest.approx(1 / 9000, rel=0.3)
    unseen = rooms(a=slow, b={**fast, "trust": 0.1})["b"]
    assert unseen.token_s == 1 / 9000  # who is fast stays so


def test_it_is_tried_again_when_it_is_believed_no_more_and_by_one_request() -> None:
    placer = Placer(SETTINGS)
    slow = {"first_s": 2.0, "first_tokens": 16.0}
    placer.see([backend("a", **slow, trust=0.01), backend("b", first_s=0.1, in_flight=1)])
    assert places(placer, 1) == ["a"]
    placer.see([backend("a", **slow, in_flight=1)])  # as it looks from then on
    assert set(places(placer, 10)) == {"b"}
