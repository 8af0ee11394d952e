"""The index of reported KV blocks: what engines told, what a prompt finds there, and how placing goes by it."""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_views import NOW_S, backend, waiter

from gateway.block_keys import ID_BYTES, PromptBlocks, block_keys, id_bytes, root_key
from gateway.config import PlacingSettings
from gateway.routing.blocks import BlockIndex
from gateway.routing.feeds import BlockEvent, BlocksCleared, BlocksRemoved, BlocksStored, Feed, Knowledge
from gateway.routing.hopes import EXPECTED_S
from gateway.routing.placer import Placer
from gateway.routing.prefixes import thinned
from gateway.types import Placed

SIZE = 4
A, B, C = 1, 2, 4
SETTINGS = PlacingSettings(headroom_ratio=0.0)


def blocks_of(ids: list[int], adapter: str = "", *sizes: int) -> PromptBlocks:
    keys = {size: block_keys(id_bytes(ids), size, root_key(adapter)) for size in sizes or (SIZE,)}
    return PromptBlocks(len(ids), keys)


def hashes_of(ids: list[int], adapter: str = "", size: int = SIZE) -> list[int]:
    """Hashes as some engine would make them: not ours."""
    chained, hashes = hash(("theirs", adapter)), []
    for start in range(0, len(ids) - size + 1, size):
        chained = hash((chained, *ids[start : start + size]))
        hashes.append(chained)
    return hashes


def stored(ids: list[int], start: int = 0, adapter: str = "", size: int = SIZE, **more: Any) -> BlocksStored:
    """All full blocks of ``ids`` from block ``start`` on."""
    hashes = hashes_of(ids, adapter, size)
    data = id_bytes(ids)[start * size * ID_BYTES : len(hashes) * size * ID_BYTES]
    return BlocksStored(hashes[start:], hashes[start - 1] if start else None, data, size, adapter, **more)


def known(index: BlockIndex, name: str, bit: int, *events: BlockEvent, rank: int = 0) -> Feed:
    index.room(name, bit)
    feed = index.feed(name, rank)
    feed.restart(Knowledge.EXACT)
    for event in events:
        feed.apply(event)
    return feed


PROMPT = list(range(100, 141))  # ten blocks, and one token


def test_a_prompt_finds_the_run_of_its_first_blocks() -> None:
    index = BlockIndex()
    known(index, "a", A, stored(PROMPT[:20]))
    known(index, "b", B, stored(PROMPT))
    known(index, "c", C, stored([7, *PROMPT]))
    assert index.match(blocks_of(PROMPT), A | B | C) == ({A: 20, B: 40}, A | B | C)
    assert index.match(blocks_of(PROMPT[:30]), A | B | C) == ({A: 20, B: 28}, A | B | C)
    assert index.match(blocks_of(PROMPT), A) == ({A: 20}, A)


def test_the_last_token_is_never_cached() -> None:
    index = BlockIndex()
    known(index, "a", A, stored(PROMPT))
    assert index.match(blocks_of(PROMPT[:40]), A)[0] == {A: 36}
    assert index.match(blocks_of(PROMPT[:41]), A)[0] == {A: 40}


def test_blocks_may_come_one_by_one_and_go_tail_first() -> None:
    index = BlockIndex()
    feed = known(index, "a", A)
    for place in range(10):
        feed.apply(stored(PROMPT[: (place + 1) * SIZE], place))
        assert index.match(blocks_of(PROMPT), A)[0] == {A: (place + 1) * SIZE}
    hashes = hashes_of(PROMPT)
    for place in reversed(range(10)):
        feed.apply(BlocksRemoved([hashes[place]]))
        assert index.match(blocks_of(PROMPT), A)[0] == ({A: place * SIZE} if place else {})
    assert feed.blocks == 0 and not index._shelf.holders


def test_a_block_that_is_there_twice_stays_until_both_are_gone() -> None:
    index = BlockIndex()
    feed = known(index, "a", A, stored(PROMPT[:12]), stored(PROMPT[:12]))
    last = hashes_of(PROMPT)[2]
    feed.apply(BlocksRemoved([last]))
    assert index.match(blocks_of(PROMPT), A)[0] == {A: 12}
    feed.apply(BlocksRemoved([last]))
    assert index.match(blocks_of(PROMPT), A)[0] == {A: 8}


def test_adapters_and_salts_share_no_blocks() -> None:
    index = BlockIndex()
    feed = known(index, "a", A, stored(PROMPT, adapter="lora"))
    assert index.match(blocks_of(PROMPT), A)[0] == {}
    assert index.match(blocks_of(PROMPT, "lora"), A)[0] == {A: 40}
    salted = BlocksStored(hashes_of(PROMPT, "salted"), None, id_bytes(PROMPT[:40]), SIZE, salt="s")
    feed.apply(salted)
    keys = {SIZE: block_keys(id_bytes(PROMPT), SIZE, root_key("", "s"))}
    assert index.match(PromptBlocks(len(PROMPT), keys), A)[0] == {A: 40}
    assert index.match(blocks_of(PROMPT), A)[0] == {}


def test_what_else_sets_a_block_apart_ends_the_run_of_plain_prompts() -> None:
    index = BlockIndex()
    extras = ("", "", "an image", *[""] * 7)
    known(index, "a", A, stored(PROMPT, extras=extras))
    assert index.match(blocks_of(PROMPT), A)[0] == {A: 8}


def test_backends_with_blocks_of_other_sizes_are_looked_up_by_theirs() -> None:
    index = BlockIndex()
    known(index, "a", A, stored(PROMPT))
    known(index, "b", B, stored(PROMPT, size=8))
    assert index.sizes() == (4, 8)
    assert index.match(blocks_of(PROMPT, "", 4, 8), A | B) == ({A: 40, B: 40}, A | B)
    assert index.match(blocks_of(PROMPT, "", 8), A | B) == ({B: 40}, B)  # of A nothing can be said


def test_engines_of_one_backend_count_by_the_best_unless_the_rank_is_chosen() -> None:
    index = BlockIndex()
    known(index, "a", A, stored(PROMPT[:12]), rank=0)
    known(index, "a", A, stored(PROMPT[:20]), rank=1)
    assert index.match(blocks_of(PROMPT), A) == ({A: 20}, A)
    index.room("a#0", B)
    index.room("a#1", C)
    assert index.match(blocks_of(PROMPT), B | C) == ({B: 12, C: 20}, B | C)


def test_other_groups_of_a_hybrid_model_say_nothing() -> None:
    index = BlockIndex()
    feed = known(index, "a", A, stored(PROMPT, group=1))
    feed.apply(stored(PROMPT[:8], group=0))
    feed.apply(BlocksRemoved(hashes_of(PROMPT), group=0))
    assert index.match(blocks_of(PROMPT), A)[0] == {A: 40}


def test_what_makes_no_sense_changes_nothing() -> None:
    index = BlockIndex()
    feed = known(index, "a", A)
    feed.apply(BlocksStored([1, 2], None, id_bytes([1, 2, 3]), SIZE))
    feed.apply(BlocksStored([1], None, b"", 0))
    assert (feed.odd, feed.blocks, feed.size_tokens) == (2, 0, 0)
    feed.apply(stored(PROMPT))
    feed.apply(stored(PROMPT, size=8))
    feed.apply(BlocksStored([5], 987, id_bytes([1] * SIZE), SIZE))
    feed.apply(BlocksRemoved([12345]))
    assert (feed.odd, feed.orphans, feed.blocks) == (3, 1, 10)
    assert index.match(blocks_of(PROMPT), A) == ({A: 40}, A)


def test_an_emptied_cache_is_known_to_be_empty() -> None:
    index = BlockIndex()
    feed = known(index, "a", A, stored(PROMPT))
    feed.restart(Knowledge.PARTIAL)
    assert index.match(blocks_of(PROMPT), A) == ({}, 0)
    feed.apply(stored(PROMPT[:8]))
    assert index.match(blocks_of(PROMPT), A) == ({A: 8}, 0)  # there may be more
    feed.apply(BlocksCleared())
    assert index.match(blocks_of(PROMPT), A) == ({}, A)


def test_a_cache_filled_with_what_is_known_holds_nothing_else() -> None:
    index = BlockIndex()
    feed = known(index, "a", A)
    feed.restart(Knowledge.PARTIAL)
    feed.sized(11)
    feed.apply(stored(PROMPT[:36]))
    assert index.match(blocks_of(PROMPT), A)[1] == 0
    feed.apply(stored(PROMPT, 9))
    assert index.match(blocks_of(PROMPT), A) == ({A: 40}, A)


def test_more_blocks_than_there_are_means_that_something_was_missed() -> None:
    index = BlockIndex()
    feed = known(index, "a", A)
    feed.sized(8)
    feed.apply(stored(PROMPT))
    assert (feed.overflows, feed.blocks, feed.knowledge) == (1, 0, Knowledge.PARTIAL)
    assert index.match(blocks_of(PROMPT), A) == ({}, 0)


def test_emptied_feeds_are_swept_little_by_little() -> None:
    index = BlockIndex()
    long = list(range(4000))
    feed = known(index, "a", A, stored(long))
    known(index, "b", B, stored(long[:2000]))
    feed.restart(Knowledge.EXACT)
    assert index.match(blocks_of(long), A | B)[0] == {B: 2000}
    feed.apply(stored(long[:400]))
    assert index.match(blocks_of(long), A | B)[0] == {A: 400, B: 2000}
    while index.sweep(100):
        pass
    assert index.match(blocks_of(long), A | B)[0] == {A: 400, B: 2000}
    assert len(index._shelf.holders) == 500


def test_a_placement_counts_until_it_is_reported_or_overdue() -> None:
    index = BlockIndex()
    feed = known(index, "a", A, stored(PROMPT[:8]))
    index.expire(NOW_S)
    index.expect(A, blocks_of(PROMPT))
    assert index.match(blocks_of(PROMPT), A)[0] == {A: 40}
    feed.apply(stored(PROMPT[:16], 2))
    index.expire(NOW_S + EXPECTED_S)
    assert index.match(blocks_of(PROMPT), A)[0] == {A: 16}


def test_what_was_reported_is_not_expected_any_more() -> None:
    """Else it would count for a while after it was evicted."""
    index = BlockIndex()
    feed = known(index, "a", A, stored([1] * SIZE))
    index.expect(A, blocks_of(PROMPT))
    feed.apply(stored(PROMPT))
    feed.apply(BlocksRemoved(hashes_of(PROMPT)[5:]))
    assert index.match(blocks_of(PROMPT), A)[0] == {A: 20}
    index.expect(A, blocks_of(PROMPT[:20]), 20)  # all there
    feed.apply(BlocksRemoved(hashes_of(PROMPT)))
    assert index.match(blocks_of(PROMPT), A)[0] == {}


def test_nothing_is_expected_of_a_process_that_is_gone() -> None:
    index = BlockIndex()
    known(index, "a", A, stored([1] * SIZE))
    known(index, "b", B, stored([1] * SIZE))
    index.expect(A, blocks_of(PROMPT))
    index.expect(B, blocks_of(PROMPT))
    index.gone(A)
    assert index.match(blocks_of(PROMPT), A | B)[0] == {B: 40}


def placer_with(*names: str) -> Placer:
    placer = Placer(SETTINGS)
    placer.see([backend(name) for name in names])
    return placer


def place(placer: Placer, **fields: Any) -> Placed:
    names = [each for each in ("a", "b", "c") if each in placer._rooms]
    (decision,) = placer.add(waiter(fields.pop("sequence", 1), *names, model="m", **fields), NOW_S)
    assert isinstance(decision, Placed)
    return decision


def hear(placer: Placer, name: str, *events: BlockEvent, knowledge: Knowledge = Knowledge.EXACT) -> Feed:
    feed = placer.blocks.feed(name)
    feed.restart(knowledge)
    for event in events:
        feed.apply(event)
    return feed


def test_a_request_goes_where_its_blocks_are_reported() -> None:
    for home in ("a", "b"):
        placer = placer_with("a", "b")
        hear(placer, "a", stored(PROMPT if home == "a" else PROMPT[:8]))
        hear(placer, "b", stored(PROMPT if home == "b" else PROMPT[:8]))
        placed = place(placer, tokens=41, blocks=blocks_of(PROMPT))
        assert (placed.offer.backend, placed.matched_tokens) == (home, 40)


def test_reports_beat_guesses_and_guesses_hold_elsewhere() -> None:
    """A was sent the prompt before, and has evicted it since; C publishes nothing, and was sent half of it."""
    placer = placer_with("a", "b", "c")
    hear(placer, "a", stored([1] * SIZE))
    hear(placer, "b", stored(PROMPT[:8]))
    chain = ((11, 1600), (12, 4100))
    for bit in (A, C):
        placer.prefixes.add(bit, thinned(chain, "m"))
    assert place(placer, tokens=4100, blocks=blocks_of(PROMPT), chain=chain).offer.backend == "c"


def test_answers_are_held_against_reports_or_guesses_whichever_were_asked() -> None:
    placer = placer_with("a", "b")
    hear(placer, "a", stored(PROMPT))
    placer.answered("a", 0, 1000, 900)
    placer.answered("b", 0, 500, 100)
    assert (placer.blocks.expected_tokens, placer.blocks.confirmed_tokens) == (1000, 900)
    assert (placer.prefixes.matched_tokens, placer.prefixes.confirmed_tokens) == (500, 100)
    assert placer.blocks.trust(A) < 1 and placer.prefixes.trust(A) == 1


class Engine:
    """A cache of few blocks that evicts as vLLM does: what nobody uses, tails first, the oldest first; a model to hold
    the index against."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.cached: OrderedDict[int, None] = OrderedDict()

    def run(self, ids: list[int]) -> list[BlockEvent]:
        """Compute a prompt. What is told of it, in order."""
        hashes = hashes_of(ids)[: self.capacity]
        events: list[BlockEvent] = []
        have = 0
        while have < len(hashes) and hashes[have] in self.cached:
            have += 1
        for value in hashes[:have]:
            self.cached.move_to_end(value)
        while len(self.cached) - have + len(hashes) > self.capacity:
            value, _ = self.cached.popitem(last=False)
            events.append(BlocksRemoved([value]))
        if have < len(hashes):
            events.append(stored(ids[: len(hashes) * SIZE], have))
        for value in hashes:
            self.cached[value] = None
        for value in reversed(hashes):
            self.cached.move_to_end(value)
        return events

    def tokens(self, ids: list[int]) -> int:
        run = 0
        for value in hashes_of(ids)[: (len(ids) - 1) // SIZE]:
            if value not in self.cached:
                break
            run += SIZE
        return run


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32))
def test_the_index_equals_every_engines_cache(seed: int) -> None:
    dice = random.Random(seed)
    index, prompts = BlockIndex(), [[1, 2, 3]]
    engines = [Engine(dice.randint(5, 200)) for _ in range(dice.randint(1, 4))]
    feeds = [known(index, str(place), 1 << place) for place in range(len(engines))]
    for feed, engine in zip(feeds, engines, strict=True):
        feed.sized(engine.capacity)
    for _ in range(60):
        before = dice.choice(prompts)
        prompt = before[: dice.randint(0, len(before))] + [
            dice.randrange(5) for _ in range(dice.choice([1, 9, 90, 400]))
        ]
        prompts.append(prompt)
        blocks = blocks_of(prompt)
        found, exact = index.match(blocks, 15)
        has = {1 << place: engine.tokens(prompt) for place, engine in enumerate(engines)}
        assert found == {bit: tokens for bit, tokens in has.items() if tokens}
        assert exact == sum(1 << place for place, feed in enumerate(feeds) if feed.size_tokens)
        place = dice.randrange(len(engines))
        for event in engines[place].run(prompt):
            feeds[place].apply(event)
        assert feeds[place].blocks == len(engines[place].cached)
        if dice.random() < 0.05:
            engines[place].cached.clear()
            feeds[place].apply(BlocksCleared())
        index.sweep(dice.randint(0, 50))
    while index.sweep(1000):
        pass
    assert len(index._shelf.holders) == len({key for feed in feeds for key in feed._keys.values()})


@pytest.mark.parametrize("length", [1, 7, 8, 9, 63, 64, 65, 700, 5000])
def test_runs_of_any_length_are_found_wherever_they_end(length: int) -> None:
    ids = list(range(length * SIZE + 1))
    keys = blocks_of(ids)
    for run in {1, length // 3, length // 2, length - 1, length} - {0}:
        index = BlockIndex()
        known(index, "a", A, stored(ids[: run * SIZE]))
        known(index, "b", B, stored(ids[: max(1, run // 2) * SIZE]))
        assert index.match(keys, A | B)[0] == {A: run * SIZE, B: max(1, run // 2) * SIZE}
