"""Several engines behind one backend: whatever server and gateway do in whatever order, each block is counted once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.fleet.capacity import KvCapacity
from gateway.fleet.engines import Engines
from gateway.fleet.ledger import Ledger
from gateway.types import footprint_blocks

SIZE = 16


def engines(count: int, blocks: int = 1000) -> Engines:
    """Engines of one server that were looked at once."""
    books = Engines()
    books.set_capacity(count, KvCapacity(count, blocks, SIZE))
    scrape(books, [0] * count)
    return books


def scrape(books: Engines, used: list[int], requests: list[int] | None = None) -> None:
    books.begin_scrape()
    books.reconcile(used, requests, 0.0)


def use(books: Engines) -> list[int]:
    return [books[rank].used_blocks for rank in range(len(books))]


def test_a_request_is_booked_at_the_engine_that_was_asked_for() -> None:
    books = engines(4)
    books.reserve("a", 2, 160, 0)
    assert use(books) == [0, 0, 10, 0]
    books.reserve("b", 9, 160, 0)  # there is no such engine: vLLM refuses it, and until then it is somewhere
    assert (books.used_blocks, books.in_flight) == (20, 2)
    scrape(books, [0, 0, 0, 0])
    assert books.rank_of("a") == 2


def test_a_server_that_chooses_takes_the_engine_with_the_fewest_requests() -> None:
    books = engines(2)
    books.reserve("a", None, 1600, 0)
    books.reserve("b", None, 16, 0)
    assert sorted(use(books)) == [1, 100]
    assert books[books.next_rank()].used_blocks == 100  # either may be next: the fuller one decides what fits
    books.reserve("c", None, 16, 0)
    assert books[books.next_rank()].used_blocks == 1
    books.release("a")
    assert books[books.next_rank()].used_blocks == 1


def test_requests_of_others_count_for_what_is_next() -> None:
    books = engines(2)
    scrape(books, [900, 10], [1, 7])
    assert books.next_rank() == 0  # full, and yet that is where the server sends the next one
    for key in range(7):
        books.reserve(key, None, 16, 0)
    assert [books.rank_of(key) for key in range(7)] == [0] * 6 + [0]
    assert books.next_rank() == 1
    scrape(books, [907, 10], None)  # numbers that are not told change nothing
    assert books.next_rank() == 1


def test_a_guess_is_booked_anew_where_the_use_is() -> None:
    books = engines(2)
    books.reserve("a", None, 1600, 160)
    guessed = books.rank_of("a")
    assert guessed is not None
    there = 1 - guessed
    books.first_byte("a")
    used = [0, 0]
    used[there] = 100
    scrape(books, used)
    assert (books.rank_of("a"), use(books)) == (there, used)
    assert books[there].foreign_blocks == books[guessed].shared_blocks == 0
    books.grow("a", 160)
    books.release("a")
    assert use(books) == [0, 0]


def test_a_prompt_that_is_still_being_read_in_is_booked_anew_too() -> None:
    books = engines(2)
    books.reserve("a", 0, 160, 0)
    books.first_byte("a")
    books.reserve("b", None, 1600, 0)
    assert books.rank_of("b") == 1
    scrape(books, [60, 0])
    assert (books.rank_of("b"), books.used_blocks) == (0, 110)


def test_a_request_that_nobody_has_seen_yet_stays_where_it_was_booked() -> None:
    books = engines(3)
    for key in range(3):
        books.reserve(key, None, 160, 0)
    scrape(books, [0, 0, 0])
    assert use(books) == [10, 10, 10]
    scrape(books, [10, 0, 10])
    assert use(books) == [10, 10, 10]


def test_a_wrong_guess_frees_nothing_before_it_is_known_to_be_free() -> None:
    books = engines(2)
    for key in "ab":
        books.reserve(key, None, 1600, 0)
        books.first_byte(key)
    scrape(books, [200, 0])  # both are at the first
    assert use(books) == [200, 0]
    books.release("a")
    assert books.used_blocks == 100
    scrape(books, [100, 0])
    assert use(books) == [100, 0]


def test_who_does_not_obey_is_found_out_and_followed() -> None:
    books = engines(2)
    books.reserve("a", 0, 1600, 0)
    books.first_byte("a")
    scrape(books, [0, 100])
    assert (books.rank_of("a"), books.disobeyed) == (0, 0)  # it may just have ended, and another begun
    scrape(books, [0, 100])
    assert (books.rank_of("a"), books.disobeyed, use(books)) == (1, 1, [0, 100])
    books.reserve("b", 0, 160, 0)
    books.first_byte("b")
    scrape(books, [9, 100])  # a reading may be a step old
    scrape(books, [9, 100])
    assert books.disobeyed == 1


def test_figures_must_be_one_for_each_engine() -> None:
    books = engines(2)
    with pytest.raises(ValueError, match="3 figures for 2 engines"):
        books.reconcile([0, 0, 0], None, 0.0)
    with pytest.raises(ValueError, match="engines"):
        books.reconcile([0, 0], [0], 0.0)
    books.reserve("a", 0, 16, 0)
    with pytest.raises(ValueError, match="already"):
        books.reserve("a", 1, 16, 0)


def test_a_restart_with_fewer_engines_keeps_ours_until_they_are_released() -> None:
    books = engines(4)
    for rank in range(4):
        books.reserve(rank, rank, 160, 0)
    scrape(books, [500, 10, 10, 10])
    books.set_capacity(2, KvCapacity(2, 300, SIZE))
    assert (len(books), books.in_flight, books.used_blocks) == (2, 4, 40)
    assert books[0].view(0.0) is None
    for rank in range(4):
        books.release(rank)
    scrape(books, [0, 0])
    assert (books.used_blocks, books.reserved_blocks, books.in_flight) == (0, 0, 0)


def test_a_restart_with_more_engines_knows_nothing_of_the_new_ones() -> None:
    books = engines(1)
    books.reserve("a", 0, 160, 0)
    books.set_capacity(3, None)
    assert (len(books), books.used_blocks, books.capacity) == (3, 160, None)  # tokens, while no block size is known
    books.set_capacity(3, KvCapacity(3, 100, SIZE))
    assert [books[rank].view(0.0) for rank in range(3)] == [None] * 3
    scrape(books, [10, 0, 7])
    assert use(books) == [10, 0, 7]


class _Request:
    """A request in the server of the models below, at engine ``at``."""

    def __init__(self, prompt: int, expected: int, n: int, at: int) -> None:
        self.prompt, self.expected, self.n, self.at = prompt, expected, n, at
        self.begun = self.admitted = False
        self.grown = 0

    def physical(self) -> int:
        return self.booked() if self.admitted else 0

    def booked(self) -> int:
        return footprint_blocks(self.prompt, -(-self.grown // self.n), self.n, SIZE)


class Server(RuleBasedStateMachine):
    """A server with several engines, and a gateway whose events and scrapes interleave in every way. Engines have
    constant use by others. The gateway's books, and beside them one for the server as a whole."""

    pinned = True

    @initialize(foreign=st.lists(st.integers(0, 300), min_size=1, max_size=4))
    def start(self, foreign: list[int]) -> None:
        self.foreign = foreign if self.pinned else [0] * len(foreign)
        self.books, self.whole = Engines(), Ledger()
        self.requests: dict[int, _Request] = {}
        self.next = 0
        self.sample: list[int] | None = None
        self.scraping = False
        self._new_process(len(foreign), 1000)

    def _new_process(self, count: int, blocks: int) -> None:
        self.books.set_capacity(count, KvCapacity(count, blocks, SIZE))
        self.whole.set_capacity(KvCapacity(count, blocks, SIZE))
        for key in list(self.requests):
            self._release(key)
        assert (self.books.used_blocks, self.books.reserved_blocks, self.books.in_flight) == (0, 0, 0)
        self.begin()
        self.answer()
        self.finish()

    def _pick(self, index: int) -> tuple[int, _Request]:
        key = list(self.requests)[index % len(self.requests)]
        return key, self.requests[key]

    def _release(self, key: int) -> None:
        del self.requests[key]
        self.books.release(key)
        self.whole.release(key)

    @rule(prompt=st.integers(1, 400), expected=st.integers(0, 200), n=st.integers(1, 3), at=st.integers(0, 3))
    def place(self, prompt: int, expected: int, n: int, at: int) -> None:
        self.next += 1
        at %= len(self.books)
        self.requests[self.next] = _Request(prompt, expected, n, at)
        self.books.reserve(self.next, at if self.pinned else None, prompt, expected, n)
        self.whole.reserve(self.next, prompt, expected, n)

    @precondition(lambda self: self.requests)
    @rule(index=st.integers(0, 50))
    def admit(self, index: int) -> None:
        self._pick(index)[1].admitted = True

    @precondition(lambda self: self.requests)
    @rule(index=st.integers(0, 50))
    def first_byte(self, index: int) -> None:
        key, request = self._pick(index)
        if request.admitted:
            request.begun = True
            self.books.first_byte(key)
            self.whole.first_byte(key)

    @precondition(lambda self: self.requests)
    @rule(index=st.integers(0, 50), tokens=st.integers(1, 60))
    def grow(self, index: int, tokens: int) -> None:
        key, request = self._pick(index)
        if request.begun:
            request.grown += tokens
            self.books.grow(key, tokens)
            self.whole.grow(key, tokens)

    @precondition(lambda self: self.requests)
    @rule(index=st.integers(0, 50))
    def release(self, index: int) -> None:
        self._release(self._pick(index)[0])

    @precondition(lambda self: not self.scraping)
    @rule()
    def begin(self) -> None:
        self.scraping, self.sample = True, None
        self.books.begin_scrape()
        self.whole.begin_scrape()

    def at_rank(self, rank: int) -> list[_Request]:
        return [request for request in self.requests.values() if request.at == rank]

    @precondition(lambda self: self.scraping)
    @rule()
    def answer(self) -> None:
        self.sample = [
            foreign + sum(request.physical() for request in self.at_rank(rank))
            for rank, foreign in enumerate(self.foreign)
        ]
        self.counts = [
            sum(request.n for request in self.at_rank(rank) if request.admitted) for rank in range(len(self.foreign))
        ]

    @precondition(lambda self: self.scraping and self.sample is not None)
    @rule()
    def finish(self) -> None:
        assert self.sample is not None
        self.books.reconcile(self.sample, self.counts, 0.0)
        self.whole.reconcile(sum(self.sample), 0.0)
        self.scraping = False

    @precondition(lambda self: self.scraping)
    @rule()
    def give_up(self) -> None:
        self.scraping = False

    @rule(foreign=st.lists(st.integers(0, 300), min_size=1, max_size=4), blocks=st.integers(500, 2000))
    def restart(self, foreign: list[int], blocks: int) -> None:
        """Another process, with another number of engines: all that ran has failed."""
        if self.books.capacity != KvCapacity(len(foreign), blocks, SIZE):
            self.foreign = foreign if self.pinned else [0] * len(foreign)
            self.scraping = False
            self._new_process(len(foreign), blocks)

    @invariant()
    def every_request_is_at_one_engine_and_sums_are_those_of_the_engines(self) -> None:
        if not hasattr(self, "books"):
            return
        ledgers = [self.books[rank] for rank in range(len(self.books))]
        assert self.books.in_flight == len(self.requests) == sum(ledger.in_flight for ledger in ledgers)
        assert self.books.used_blocks == sum(ledger.used_blocks for ledger in ledgers)
        assert self.books.reserved_blocks == sum(ledger.reserved_blocks for ledger in ledgers)
        pending = sum(request.prompt for request in self.requests.values() if not request.begun)
        assert sum(ledger.pending_prompt_tokens for ledger in ledgers) == pending == self.whole.pending_prompt_tokens
        for key in self.requests:
            rank = self.books.rank_of(key)
            assert rank is not None
            assert ledgers[rank].weight(key)[0] == self.requests[key].booked()
        self.uses_are_right(ledgers)

    def uses_are_right(self, ledgers: list[Ledger]) -> None:
        for rank, ledger in enumerate(ledgers):
            assert ledger.foreign_blocks == self.foreign[rank]
            assert ledger.used_blocks == self.foreign[rank] + sum(item.booked() for item in self.at_rank(rank))
            assert ledger.requests >= sum(item.n for item in self.at_rank(rank) if item.begun)
        assert self.books.used_blocks == self.whole.used_blocks


class ServerThatChooses(Server):
    """The same without pinning, at its worst: any request may be at any engine, wherever one would expect it."""

    pinned = False

    def uses_are_right(self, ledgers: list[Ledger]) -> None:
        """No block of ours is lost, whatever was guessed."""
        assert self.books.used_blocks >= sum(item.booked() for item in self.requests.values()) == self.whole.used_blocks

    @precondition(lambda self: not self.scraping)
    @rule()
    def look_while_nothing_moves(self) -> None:
        """Once all have begun to answer, one reading makes every engine's use right."""
        for key, request in self.requests.items():
            request.admitted = request.begun = True
            self.books.first_byte(key)
            self.whole.first_byte(key)
        self.begin()
        self.answer()
        self.finish()
        assert use(self.books) == self.sample
        assert [self.books[rank].requests for rank in range(len(self.books))] == self.counts
        assert self.books.used_blocks == self.whole.used_blocks


for machine in (Server, ServerThatChooses):
    machine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
test_pinned = Server.TestCase
test_a_server_that_chooses = ServerThatChooses.TestCase


@given(st.data())
def test_when_all_are_released_a_scrape_of_zero_leaves_nothing(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 4))
    books = engines(count)
    keys = range(data.draw(st.integers(0, 10)))
    figures = st.lists(st.integers(0, 1000), min_size=count, max_size=count)
    for key in keys:
        rank = data.draw(st.none() | st.integers(-1, 5))
        books.reserve(key, rank, data.draw(st.integers(0, 5000)), data.draw(st.integers(0, 500)))
        if data.draw(st.booleans()):
            books.first_byte(key)
        books.grow(key, data.draw(st.integers(0, 900)))
        if data.draw(st.booleans()):
            scrape(books, data.draw(figures), data.draw(st.none() | figures))
        assert sum(books[rank].in_flight for rank in range(count)) == books.in_flight == key + 1
    for key in data.draw(st.permutations(keys)):
        books.release(key)
        books.release(key)
    scrape(books, [0] * count, [0] * count)
    assert (books.used_blocks, books.reserved_blocks, books.in_flight) == (0, 0, 0)
    assert [books[rank].requests for rank in range(count)] == [0] * count
