"""What stays of requests that left the queue, or that wait for a backend alone that begins to rest: nothing."""

from __future__ import annotations

from routing_views import NOW_S, busy, waiter

from gateway.config import PlacingSettings
from gateway.routing.placer import Placer
from gateway.routing.prefixes import LEAST_LINK_TOKENS, PrefixIndex
from gateway.routing.times import MOST_STALE
from gateway.types import Placed, Refused

SETTINGS = PlacingSettings(headroom_ratio=0.0, short_first_s=60.0)
CONVERSATION = ((1, 1600), (2, 3200), (3, 6400))


def test_a_request_that_waits_again_is_not_held_to_its_first_deadline() -> None:
    placer = Placer(SETTINGS)
    placer.see([busy("a", 1000)])
    placer.add(waiter(1, "a", arrived_s=NOW_S, deadline_s=NOW_S + 100), NOW_S)
    placer.see([busy("a", 500)])
    (placed,) = placer.decide(NOW_S + 1)
    assert isinstance(placed, Placed)
    placer.see([busy("a", 1000)])
    placer.add(waiter(1, "a", arrived_s=NOW_S + 80, deadline_s=NOW_S + 179, tag=placed.tag), NOW_S + 80)
    assert placer.decide(NOW_S + 101) == []
    assert placer.decide(NOW_S + 179) == [Refused(1, "timeout")]


def test_a_flood_of_requests_that_hang_up_leaves_nothing_behind() -> None:
    placer = Placer(SETTINGS)
    placer.see([busy("a", 1000)])
    placer.add(waiter(0, "a", arrived_s=NOW_S, deadline_s=NOW_S + 1), NOW_S)
    for sequence in range(1, 20 * MOST_STALE):
        placer.add(waiter(sequence, "a", arrived_s=NOW_S, deadline_s=NOW_S + 3600), NOW_S)
        placer.remove(sequence)
    assert len(placer._times) <= 2 * (MOST_STALE + 4)
    assert placer.decide(NOW_S + 1) == [Refused(0, "timeout")]


def test_nobody_waits_for_a_backend_that_rests_while_another_has_room() -> None:
    placer = Placer(SETTINGS)
    placer.see([busy("a", 0), busy("b", 999)])
    first = waiter(1, "a", "b", tokens=6400, model="m", chain=CONVERSATION)
    assert len(placer.add(first, NOW_S)) == 1
    elsewhere = busy("b", 100, in_flight=20)
    placer.see([busy("a", 1000), elsewhere])
    placer.add(waiter(2, "a", "b", tokens=6416, model="m", chain=CONVERSATION, deadline_s=NOW_S + 300), NOW_S)
    assert placer.decide(NOW_S + 0.1) == []  # for the conversation's own
    placer.see([busy("a", 1000, accepting=False), elsewhere])  # an outlier, say
    (placed,) = placer.decide(NOW_S + 0.2)
    assert isinstance(placed, Placed)
    assert placed.offer.backend == "b"


def test_answers_of_a_token_each_take_no_more_memory_than_long_ones() -> None:
    index = PrefixIndex()
    index.clear(1, 100_000)
    for _ in range(10 * LEAST_LINK_TOKENS):
        index.occupy(1, 1)
    assert index.tokens(1) == 10 * LEAST_LINK_TOKENS
    assert len(index._shelf(1).links) == 10
