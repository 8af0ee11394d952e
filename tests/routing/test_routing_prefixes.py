"""The prefix index: what is guessed to be cached where, and how the guesses shape placing."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from routing_views import NOW_S, backend, busy, waiter

from gateway.config import PlacingSettings
from gateway.routing.placer import Placer
from gateway.routing.prefixes import PrefixIndex, thinned
from gateway.types import Placed

SETTINGS = PlacingSettings(headroom_ratio=0.0)
A, B = 1, 2


def chain(*pieces: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """A chain out of (content, tokens) of each piece."""
    links: list[tuple[int, int]] = []
    so_far, tokens = 0, 0
    for content, length in pieces:
        so_far, tokens = hash((so_far, content)), tokens + length
        links.append((so_far, tokens))
    return tuple(links)


def place(placer: Placer, request) -> Placed:  # type: ignore[no-untyped-def]
    (decision,) = placer.add(request, NOW_S)
    assert isinstance(decision, Placed)
    return decision


def test_the_longest_common_beginning_is_found_for_each_backend() -> None:
    index = PrefixIndex()
    index.add(A, chain((1, 100), (2, 100), (3, 100)))
    index.add(B, chain((1, 100), (9, 100)))
    assert index.match(chain((1, 100), (2, 100), (4, 500)), A | B) == {A: 200, B: 100}
    assert index.match(chain((1, 100), (2, 100), (4, 500)), B) == {B: 100}
    assert index.match(chain((7, 100), (2, 100)), A | B) == {}


def test_what_was_used_longest_ago_goes_first_and_ends_go_before_beginnings() -> None:
    index = PrefixIndex()
    index.clear(A, 1000)
    old, new = chain((1, 300), (2, 300)), chain((8, 300), (9, 300))
    index.add(A, old)
    index.add(A, new)
    assert index.match(old, A) == {A: 300}
    assert index.match(new, A) == {A: 600}
    assert index.tokens(A) <= 1000


def test_answers_take_room_as_well() -> None:
    index = PrefixIndex()
    index.clear(A, 1000)
    index.add(A, chain((1, 600)))
    for _ in range(5):
        index.occupy(A, 100)
    assert index.match(chain((1, 600)), A) == {}


def test_a_request_that_was_never_answered_leaves_what_was_there_before() -> None:
    index = PrefixIndex()
    index.add(A, chain((1, 100)))
    index.add(A, chain((1, 100), (2, 400)))
    index.forget(A, chain((1, 100), (2, 400)), 100)
    assert index.match(chain((1, 100), (2, 400)), A) == {A: 100}


def test_trust_follows_what_the_answers_tell() -> None:
    index = PrefixIndex()
    for _ in range(50):
        index.check(A, 1000, 0)
        index.check(B, 1000, 990)
    assert index.trust(A) < 0.05
    assert index.trust(B) > 0.95
    for _ in range(50):
        index.check(A, 1000, 1000)
    assert index.trust(A) > 0.9
    index.check(A, 16, 0)  # less than a block or two says nothing
    assert index.trust(A) > 0.9


def test_thinning_keeps_the_same_links_of_a_prompt_that_grew() -> None:
    long = chain(*((number, 17) for number in range(3000)))
    kept = thinned(long, "m")
    assert len(kept) < 200
    assert thinned(long[:1000], "m") == kept[: len(thinned(long[:1000], "m"))]
    assert not {link for link, _ in kept} & {link for link, _ in thinned(long, "other")}


def test_a_conversation_returns_to_where_its_beginning_is() -> None:
    placer = Placer(SETTINGS)
    placer.see([backend("a"), backend("b")])
    first = place(placer, waiter(1, "a", "b", tokens=4000, chain=chain((1, 4000))))
    other = "b" if first.offer.backend == "a" else "a"
    placer.see([busy(first.offer.backend, 300), backend(other)])  # busier than the other one
    again = place(placer, waiter(2, "a", "b", tokens=4400, chain=chain((1, 4000), (2, 400))))
    assert (again.offer.backend, again.matched_tokens) == (first.offer.backend, 4000)
    fresh = place(placer, waiter(3, "a", "b", tokens=4400, chain=chain((5, 4400))))
    assert (fresh.offer.backend, fresh.matched_tokens) == (other, 0)


def test_a_long_queue_of_prompts_outweighs_a_short_common_beginning() -> None:
    placer = Placer(SETTINGS)
    placer.see([backend("a"), backend("b")])
    first = place(placer, waiter(1, "a", "b", tokens=500, chain=chain((1, 500)))).offer.backend
    other = "b" if first == "a" else "a"
    placer.see([busy(first, 100, pending_prompt_tokens=60_000), backend(other)])
    assert place(placer, waiter(2, "a", "b", tokens=600, chain=chain((1, 500), (2, 100)))).offer.backend == other


def test_many_conversations_with_one_beginning_do_not_herd() -> None:
    """All share a system prompt; after the first, what is queued there soon costs more than the prompt saves."""
    placer = Placer(SETTINGS)
    placer.see([backend("a"), backend("b"), backend("c")])
    placed = [
        place(placer, waiter(n, "a", "b", "c", tokens=1000, chain=chain((1, 300), (100 + n, 700)))).offer.backend
        for n in range(12)
    ]
    assert all(placed.count(name) >= 3 for name in "abc")


def test_a_backend_that_was_restarted_or_caches_nothing_has_no_prefix() -> None:
    placer = Placer(SETTINGS)
    placer.see([backend("a")])
    place(placer, waiter(1, "a", tokens=400, chain=chain((1, 400))))
    placer.see([backend("a", caches=False)])
    assert place(placer, waiter(2, "a", tokens=400, chain=chain((1, 400)))).matched_tokens == 0
    placer.see([backend("a")])
    assert place(placer, waiter(3, "a", tokens=400, chain=chain((1, 400)))).matched_tokens == 400
    placer.see([backend("a", epoch=1)])
    assert place(placer, waiter(4, "a", tokens=400, chain=chain((1, 400)))).matched_tokens == 0


def test_a_session_stays_where_it_was_if_nothing_else_is_known() -> None:
    placer = Placer(SETTINGS)
    placer.see([backend(name) for name in "abcd"])
    first = place(placer, waiter(1, *"abcd", tokens=1000, session="s")).offer.backend
    placer.see([backend(name) for name in "abcd"])
    assert place(placer, waiter(2, *"abcd", tokens=1200, session="s")).offer.backend == first
    assert place(placer, waiter(3, *"abcd", tokens=1200, session="t")).offer.backend != first


def test_an_adapter_goes_where_it_is_at_work_and_not_where_the_slots_are_taken() -> None:
    placer = Placer(SETTINGS)
    at_work = busy("a", 300, loras=frozenset({"x"}), lora_slots=1)
    placer.see([at_work, backend("b", loras=frozenset({"y"}), lora_slots=1), backend("c", lora_slots=1)])
    assert place(placer, waiter(1, *"abc", model="m", tokens=160)).offer.backend != "a"
    for view in (at_work, backend("b", loras=frozenset({"y"}), lora_slots=1), backend("c", lora_slots=1)):
        placer.see([backend(view.name, windows={"m": 32768, "x": 32768, "z": 32768}, kv=view.kv, loras=view.loras,
                            lora_slots=1)])  # fmt: skip
    assert place(placer, waiter(2, *"abc", model="x", adapter=True, tokens=160)).offer.backend == "a"
    assert place(placer, waiter(3, *"abc", model="z", adapter=True, tokens=160)).offer.backend == "c"


def test_a_slower_backend_gets_less_and_a_weightier_one_more() -> None:
    placer = Placer(SETTINGS)
    placer.see([backend("a", prefill_s=1 / 1000), backend("b", prefill_s=1 / 9000), backend("c")])
    placed = [place(placer, waiter(n, "a", "b", tokens=100)).offer.backend for n in range(20)]
    assert placed.count("b") > 2 * placed.count("a")
    placer = Placer(SETTINGS)
    placer.see([backend("a", share=3.0), backend("b", share=1.0)])
    placed = [place(placer, waiter(n, "a", "b", tokens=160)).offer.backend for n in range(40)]
    assert placed.count("a") > 2 * placed.count("b") > 0


def test_a_backend_that_generates_far_slower_is_avoided() -> None:
    placer = Placer(SETTINGS)
    placer.see([backend("a", output_s=0.2), backend("b", output_s=0.01), backend("c", output_s=0.012)])
    placed = [place(placer, waiter(n, "a", "b", "c", tokens=16, output=100)).offer.backend for n in range(10)]
    assert placed.count("a") == 0
    assert placed.count("c") > 2


pieces = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([40, 64, 300])), min_size=1, max_size=6)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["add", "forget", "occupy", "clear"]), st.sampled_from([A, B]), pieces)))
def test_the_shelves_add_up_whatever_happens(script: list[tuple[str, int, list[tuple[int, int]]]]) -> None:
    index = PrefixIndex()
    index.clear(A, 700)
    index.clear(B, 700)
    for what, bit, content in script:
        links = chain(*content)
        if what == "add":
            index.add(bit, links)
        elif what == "forget":
            index.forget(bit, links, links[0][1])
        elif what == "occupy":
            index.occupy(bit, links[0][1])
        else:
            index.clear(bit, 700)
        for shelf_bit in (A, B):
            shelf = index._shelves[shelf_bit]
            assert shelf.tokens == sum(shelf.links.values()) <= 700
            held = {link for link, mask in index._holders.items() if mask & shelf_bit}
            assert held == {link for link in shelf.links if link in index._holders}
        found = index.match(links, A | B)
        assert all(0 < tokens <= links[-1][1] for tokens in found.values())


def test_counters_that_tell_of_several_answers_weigh_as_much_as_these() -> None:
    one, many = PrefixIndex(), PrefixIndex()
    for _ in range(5):
        one.check(1, 1000, 250)
    many.check_counters(1, 5000, 1250, 5)
    assert abs(one.trust(1) - many.trust(1)) < 1e-9
    assert (many.matched_tokens, many.confirmed_tokens) == (one.matched_tokens, one.confirmed_tokens)
    many.check_counters(1, 5000, 9000, 1000)
    assert many.trust(1) == 1.0
    many.check_counters(1, 5000, 0, 1000)
    assert many.trust(1) == 0.01  # never so low that nothing more is sent to find out
    many.check_counters(1, 200, 200, 1000)
    assert many.trust(1) == 0.01  # a block or two say nothing
