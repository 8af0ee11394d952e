"""Placing: who goes where, who waits, who is refused; nobody starves and nobody is placed on top of others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_views import NOW_S, backend, busy, kv, offer, waiter

from gateway.config import PlacingSettings
from gateway.routing.assign import assign
from gateway.types import BackendView, Decision, Health, Need, Placed, Refused, Waiter

SETTINGS = PlacingSettings(headroom_ratio=0.0, short_first_s=0.0)


def decide(queue: Sequence[Waiter], *views: BackendView, **changes: float) -> dict[int, str]:
    """What becomes of each waiter: a backend's name, or why it is refused. Who waits is left out."""
    placing = SETTINGS.model_copy(update=changes)
    return said(assign(queue, {view.name: view for view in views}, NOW_S, placing))


def said(decisions: Sequence[Decision]) -> dict[int, str]:
    return {item.sequence: item.offer.backend if isinstance(item, Placed) else item.reason for item in decisions}


def test_an_empty_queue_needs_no_decision() -> None:
    assert decide([], backend("a")) == {}


def test_the_first_offer_with_room_wins() -> None:
    small, large = offer("small", 4096), offer("large", 65536)
    request = waiter(1, offers=(small, large))
    assert decide([request], backend("small"), backend("large", 65536)) == {1: "small"}


def test_a_larger_window_is_used_when_the_smaller_one_is_full() -> None:
    request = waiter(1, offers=(offer("small", 4096), offer("large", 65536)))
    assert decide([request], busy("small", 995), backend("large", 65536)) == {1: "large"}


def test_a_waiting_request_takes_whichever_window_frees_first() -> None:
    request = waiter(1, offers=(offer("small", 4096), offer("large", 65536)))
    assert decide([request], busy("small", 995), busy("large", 995, windows={"m": 65536})) == {}
    assert decide([request], busy("small", 995), busy("large", 900, windows={"m": 65536})) == {1: "large"}
    assert decide([request], busy("small", 900), busy("large", 995, windows={"m": 65536})) == {1: "small"}


def test_of_equal_windows_the_cheaper_backend_is_taken() -> None:
    request = waiter(1, "a", "b")
    assert decide([request], busy("a", 900), busy("b", 100)) == {1: "b"}
    queued = busy("b", 100, pending_prompt_tokens=50_000)
    assert decide([request], busy("a", 300), queued) == {1: "a"}


def test_placements_of_one_call_see_each_other() -> None:
    requests = [waiter(n, "a", "b", tokens=1600) for n in range(4)]
    placed = decide(requests, backend("a"), backend("b"))
    assert sorted(placed.values()) == ["a", "a", "b", "b"]


def test_what_was_placed_a_moment_ago_takes_room() -> None:
    requests = [waiter(n, "a", tokens=4800) for n in range(4)]
    assert decide(requests, busy("a", 50)) == {0: "a", 1: "a", 2: "a"}


def test_expected_output_and_headroom_count() -> None:
    assert decide([waiter(1, "a", tokens=1600, output=0)], busy("a", 900)) == {1: "a"}
    assert decide([waiter(1, "a", tokens=1600, output=1)], busy("a", 900)) == {}
    assert decide([waiter(1, "a", tokens=1600)], busy("a", 880), headroom_ratio=0.02) == {1: "a"}
    assert decide([waiter(1, "a", tokens=1600)], busy("a", 881), headroom_ratio=0.02) == {}


def test_who_waits_keeps_a_claim_so_that_smaller_ones_do_not_starve_it() -> None:
    big, little = waiter(1, "a", tokens=8000), waiter(2, "a", tokens=16)
    assert decide([big, little], busy("a", 600)) == {}


def test_a_claim_does_not_hold_up_other_backends() -> None:
    big, little, other = waiter(1, "a", tokens=8000), waiter(2, "a", "b", tokens=16), waiter(3, "b")
    assert decide([big, little, other], busy("a", 600), busy("b", 600)) == {2: "b", 3: "b"}


def test_an_idle_backend_takes_a_request_whatever_the_estimate_says() -> None:
    request = waiter(1, "a", tokens=15_000, output=5_000)
    assert decide([request], backend("a", kv=kv(reserved=700))) == {1: "a"}
    assert decide([request], backend("a", kv=kv(reserved=700), running=1)) == {}
    assert decide([request], backend("a", kv=kv(reserved=700), waiting=1)) == {}
    assert decide([request], backend("a", kv=kv(reserved=700), in_flight=1)) == {}
    assert decide([request], backend("a", kv=kv(reserved=700), running=None, waiting=None)) == {1: "a"}


def test_only_one_request_drips_into_an_idle_backend() -> None:
    requests = [waiter(n, "a", tokens=15_000, output=5_000) for n in (1, 2)]
    assert decide(requests, backend("a")) == {1: "a"}


def test_backends_of_unknown_cache_are_never_full_and_the_least_loaded_is_taken() -> None:
    views = [busy("a", 0, kv=None, in_flight=7), busy("b", 0, kv=None, in_flight=3), busy("c", 0, in_flight=5)]
    requests = [waiter(n, "a", "b", "c", tokens=1600) for n in range(4)]
    assert list(decide(requests, *views).values()) == ["b", "b", "b", "c"]


def test_a_deadline_that_has_passed_is_a_timeout_even_if_there_is_room_now() -> None:
    assert decide([waiter(1, "a", deadline_s=NOW_S)], backend("a")) == {1: "timeout"}


def test_a_timed_out_request_gives_up_its_claim() -> None:
    big = waiter(1, "a", tokens=8000, deadline_s=NOW_S - 1)
    assert decide([big, waiter(2, "a")], busy("a", 600)) == {1: "timeout", 2: "a"}


@pytest.mark.parametrize("fields", [{"health": Health.DOWN}, {"draining": True}])
def test_without_a_backend_left_a_request_is_refused_at_once(fields: dict[str, object]) -> None:
    assert decide([waiter(1, "a")], backend("a", **fields)) == {1: "no_backend"}
    assert decide([waiter(1, "a", "b")], backend("a", **fields), backend("b")) == {1: "b"}


def test_a_backend_nobody_knows_or_has_looked_at_is_told_apart() -> None:
    assert decide([waiter(1, "gone")]) == {1: "no_backend"}
    assert decide([waiter(1, "a")], backend("a", health=Health.UNKNOWN, windows={}, kv=None)) == {}


def test_a_backend_that_does_not_accept_for_a_moment_is_waited_for() -> None:
    assert decide([waiter(1, "a")], backend("a", accepting=False)) == {}


def test_a_recovering_backend_gets_one_request_to_try_it() -> None:
    assert decide([waiter(1, "a"), waiter(2, "a")], backend("a", trial=True)) == {1: "a"}


def test_excluded_backends_get_nothing() -> None:
    request = waiter(1, "a", "b", excluded=frozenset({"a"}))
    assert decide([request], backend("a"), backend("b")) == {1: "b"}
    alone = waiter(1, "a", excluded=frozenset({"a"}))
    assert decide([alone], backend("a")) == {1: "no_backend"}


def test_an_offer_that_no_longer_stands_is_not_taken() -> None:
    request = waiter(1, "a", "b", model="m")
    assert decide([request], backend("a", window=4096), backend("b")) == {1: "b"}
    assert decide([request], backend("a", windows={"n": 32768}), backend("b")) == {1: "b"}
    assert decide([waiter(1, "a", model="m")], backend("a", window=4096)) == {1: "no_backend"}


def test_a_prompt_larger_than_every_cache_is_refused_and_holds_up_nobody() -> None:
    huge = waiter(1, "a", "b", tokens=16_001)
    assert decide([huge, waiter(2, "a")], busy("a", 10), busy("b", 10)) == {1: "too_large", 2: "a"}
    assert decide([huge], busy("a", 10), busy("b", 10, kv=None)) == {1: "b"}


def test_one_engines_cache_bounds_a_request_not_the_sum_of_all() -> None:
    request = waiter(1, "a", tokens=5000)
    assert decide([request], backend("a", kv=kv(0, 1000, engine_capacity=250))) == {1: "too_large"}


def test_a_request_that_can_never_fit_one_backend_claims_nothing_there() -> None:
    wide = waiter(1, "small", "large", tokens=12_000)
    views = [busy("small", 10, kv=kv(10, 500)), busy("large", 990)]
    assert decide([wide, waiter(2, "small", "large")], *views) == {2: "small"}


names = st.sampled_from("abcd")
views_of = st.fixed_dictionaries(
    {
        name: st.builds(
            lambda reserved, in_flight, known, health, draining, trial, name=name: backend(
                name,
                kv=kv(reserved) if known else None,
                in_flight=in_flight,
                running=in_flight,
                health=health,
                draining=draining,
                trial=trial,
            ),
            st.integers(0, 1000),
            st.integers(0, 3),
            st.booleans(),
            st.sampled_from(Health),
            st.booleans(),
            st.booleans(),
        )
        for name in "abcd"
    }
)
queues = st.lists(
    st.tuples(
        st.lists(names, min_size=1, max_size=4, unique=True),
        st.integers(0, 20_000),
        st.integers(0, 4000),
        st.booleans(),
    ),
    max_size=12,
)


def room(view: BackendView, need: Need) -> bool:
    return view.kv is None or view.kv.reserved_blocks + need.blocks(16) <= view.kv.capacity_blocks


@settings(max_examples=300, deadline=None)
@given(queues, views_of)
def test_no_backend_is_overbooked_nobody_is_overtaken_and_nobody_waits_for_nothing(
    asks: list[tuple[list[str], int, int, bool]], views: Mapping[str, BackendView]
) -> None:
    queue = [
        waiter(number, *wanted, tokens=tokens, output=output, deadline_s=NOW_S - 1 if late else NOW_S + 1)
        for number, (wanted, tokens, output, late) in enumerate(asks)
    ]
    decisions = assign(queue, views, NOW_S, SETTINGS)
    assert len({item.sequence for item in decisions}) == len(decisions)
    by_sequence = {item.sequence: item for item in decisions}
    taken: dict[str, list[Need]] = {name: [] for name in views}
    claimed: set[str] = set()
    for request in queue:
        decision = by_sequence.get(request.sequence)
        usable = [
            views[item.backend]
            for item in request.offers
            if views[item.backend].health is not Health.DOWN and not views[item.backend].draining
        ]
        if isinstance(decision, Placed):
            name = decision.offer.backend
            view, need = views[name], request.need(name)
            assert view.health is Health.UP
            assert not view.draining
            assert name not in claimed  # nobody takes what somebody before is waiting for
            taken[name].append(need)
        elif isinstance(decision, Refused):
            assert decision.reason != "no_backend" or not usable
            if decision.reason == "too_large":
                assert all(
                    view.kv is not None and request.need(view.name).prompt_tokens > view.kv.capacity_blocks * 16
                    for view in usable
                )
        else:
            for view in usable:
                fits_somewhere = (
                    view.kv is None or request.need(view.name).prompt_tokens <= view.kv.capacity_blocks * 16
                )
                if fits_somewhere:
                    claimed.add(view.name)
    for name, needs in taken.items():
        view = views[name]
        assert len(needs) <= 1 or not view.trial
        if view.kv is not None and needs:
            total = view.kv.reserved_blocks + sum(need.blocks(16) for need in needs)
            # Beyond its capacity only by a drip, which comes first and alone.
            idle = view.in_flight == 0 and not view.running
            assert total <= view.kv.capacity_blocks or (idle and len(needs) == 1)
    # An idle, open backend never leaves a request waiting that its cache could hold.
    for request in queue:
        if request.sequence not in by_sequence:
            for item in request.offers:
                view = views[item.backend]
                open_now = view.health is Health.UP and not view.draining
                if open_now and view.kv is None and not view.trial:
                    pytest.fail("waits although a backend of unknown cache is there")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 16_000), min_size=1, max_size=20), st.randoms(use_true_random=False))
def test_whatever_comes_behind_everybody_is_served(prompts: list[int], chance) -> None:  # type: ignore[no-untyped-def]
    """Small requests keep coming for ever; the queue still empties in order on one backend."""
    waiting = [waiter(number, "a", tokens=tokens) for number, tokens in enumerate(prompts)]
    running: list[Waiter] = []
    arrived = len(prompts)
    served: list[int] = []
    for _ in range(40 * len(prompts)):
        waiting.append(waiter(arrived, "a", tokens=chance.randint(1, 64)))
        arrived += 1
        reserved = sum(item.need("a").blocks(16) for item in running)
        view = backend("a", kv=kv(reserved), in_flight=len(running), running=len(running))
        decisions = assign(waiting, {"a": view}, NOW_S, SETTINGS)
        placed = {item.sequence for item in decisions}
        running += [item for item in waiting if item.sequence in placed]
        waiting = [item for item in waiting if item.sequence not in placed]
        served += sorted(placed)
        if running:
            running.pop(chance.randrange(len(running)))
        if set(range(len(prompts))) <= set(served):
            break
    assert served[: len(prompts)] == list(range(len(prompts)))
