"""The ledger: no block is lost or counted twice, whatever happens in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.fleet.capacity import KvCapacity
from gateway.fleet.ledger import Ledger
from gateway.types import footprint_blocks

CAPACITY = KvCapacity(engines=1, engine_blocks=1000, block_size_tokens=16)


def ledger(used_blocks: int = 0) -> Ledger:
    """A ledger that has seen one scrape."""
    book = Ledger()
    book.set_capacity(CAPACITY)
    scrape(book, used_blocks)
    return book


def scrape(book: Ledger, used_blocks: int, at_s: float = 0.0) -> None:
    book.begin_scrape()
    book.reconcile(used_blocks, at_s)


def test_a_new_ledger_knows_nothing_and_says_so() -> None:
    book = Ledger()
    assert book.view(0.0) is None
    book.set_capacity(CAPACITY)
    assert book.view(0.0) is None  # capacity, but no use was ever observed
    scrape(book, 7, at_s=1.0)
    view = book.view(3.5)
    assert view is not None
    assert (view.capacity_blocks, view.used_blocks, view.free_blocks, view.age_s) == (1000, 7, 993, 2.5)


def test_a_placed_request_counts_at_once_with_its_expected_growth() -> None:
    book = ledger()
    book.reserve("a", prompt_tokens=100, expected_output_tokens=60)
    assert (book.used_blocks, book.reserved_blocks, book.pending_prompt_tokens) == (7, 10, 100)
    book.first_byte("a")
    assert book.pending_prompt_tokens == 0
    book.grow("a", 12)
    assert book.used_blocks == 7  # the prompt's last block had room for 12
    book.grow("a", 1)
    assert (book.used_blocks, book.reserved_blocks) == (8, 10)
    book.release("a")
    assert (book.used_blocks, book.reserved_blocks, book.in_flight) == (0, 0, 0)


def test_a_scrape_that_does_not_show_a_request_yet_leaves_it_counted() -> None:
    book = ledger()
    book.reserve("a", 160, 0)
    scrape(book, 0)
    assert (book.used_blocks, book.foreign_blocks, book.shared_blocks) == (10, 0, 0)


def test_a_scrape_that_shows_a_request_early_does_not_count_it_twice() -> None:
    book = ledger()
    book.reserve("a", 160, 0)
    scrape(book, 10)
    assert (book.used_blocks, book.foreign_blocks) == (10, 0)


def test_foreign_use_stays_known_while_our_own_requests_come_and_go() -> None:
    book = ledger(300)
    book.reserve("a", 1600, 0)
    scrape(book, 300)  # not admitted yet
    assert (book.foreign_blocks, book.used_blocks) == (300, 400)
    scrape(book, 400)  # admitted, first byte not seen
    assert (book.foreign_blocks, book.used_blocks) == (300, 400)
    book.first_byte("a")
    scrape(book, 400)
    assert (book.foreign_blocks, book.used_blocks) == (300, 400)
    book.release("a")
    assert (book.foreign_blocks, book.used_blocks) == (300, 300)


def test_a_request_released_while_the_scrape_is_under_way_is_not_taken_for_foreign() -> None:
    book = ledger()
    book.reserve("a", 1600, 0)
    book.first_byte("a")
    book.begin_scrape()
    book.release("a")
    book.reconcile(100, 0.0)  # the server answered before it freed them
    assert (book.foreign_blocks, book.used_blocks) == (0, 0)


def test_tokens_that_come_while_the_scrape_is_under_way_do_not_hide_foreign_use() -> None:
    book = ledger(50)
    book.reserve("a", 160, 0)
    book.first_byte("a")
    book.begin_scrape()
    book.grow("a", 160)
    book.reconcile(60, 0.0)  # answered before they were generated
    assert (book.foreign_blocks, book.used_blocks) == (50, 70)


def test_an_answer_that_grew_unseen_and_ended_during_the_scrape_is_not_taken_for_foreign() -> None:
    book = ledger()
    book.reserve("a", 160, expected_output_tokens=160)
    book.begin_scrape()
    book.release("a")
    book.reconcile(20, 0.0)
    assert (book.foreign_blocks, book.used_blocks) == (0, 0)


def test_a_first_byte_during_the_scrape_confirms_nothing_about_it() -> None:
    book = ledger(50)
    book.reserve("a", 1600, 0)
    book.begin_scrape()
    book.first_byte("a")
    book.reconcile(50, 0.0)
    assert (book.foreign_blocks, book.shared_blocks, book.used_blocks) == (50, 0, 150)


def test_the_unseen_growth_of_an_answer_that_is_not_streamed_is_not_taken_for_foreign() -> None:
    book = ledger()
    book.reserve("a", 160, expected_output_tokens=160)
    scrape(book, 18)
    assert (book.foreign_blocks, book.used_blocks, book.reserved_blocks) == (0, 10, 20)


def test_a_shared_prefix_is_counted_once_and_never_taken_off_too_early() -> None:
    book = ledger()
    for key in "abc":
        book.reserve(key, 1600, 0)
        book.first_byte(key)
    scrape(book, 120)  # 90 blocks held by all three, 10 by each alone
    assert (book.shared_blocks, book.used_blocks) == (180, 120)
    book.release("a")  # truly frees 10
    assert book.used_blocks == 120
    book.release("b")
    assert book.used_blocks == 100  # c alone holds as many
    book.release("c")
    assert book.used_blocks == 0


def test_use_is_never_less_than_the_largest_request_holds() -> None:
    book = ledger()
    for key, tokens in (("a", 1600), ("b", 160)):
        book.reserve(key, tokens, 0)
        book.first_byte(key)
    scrape(book, 3)
    assert book.used_blocks == 100


def test_an_outgrown_expectation_doubles_up_to_the_budget() -> None:
    book = ledger()
    book.reserve("a", 0, expected_output_tokens=16, budget_tokens=40)
    book.first_byte("a")
    reserved = []
    for _ in range(60):
        book.grow("a", 1)
        reserved.append(book.reserved_blocks)
    assert reserved[15] == 1
    assert reserved[16] == 2  # 32 expected
    assert reserved[32] == 3  # 40, the budget
    assert (book.used_blocks, reserved[59]) == (4, 4)  # a server that goes beyond the budget is still followed


def test_several_sequences_share_the_prompt_and_have_their_own_tails() -> None:
    book = ledger()
    book.reserve("a", 40, expected_output_tokens=16, n=3)
    assert (book.used_blocks, book.reserved_blocks) == (2 + 3, 2 + 3 * 2)
    book.first_byte("a")
    book.grow("a", 3 * 8)
    assert book.used_blocks == 5
    book.grow("a", 1)
    assert book.used_blocks == 2 + 3 * 2


def test_releasing_twice_or_what_never_was_changes_nothing() -> None:
    book = ledger()
    book.reserve("a", 160, 0)
    book.reserve("b", 160, 0)
    for _ in range(3):
        book.release("a")
    book.release("never")
    book.first_byte("a")
    book.grow("a", 5)
    assert (book.used_blocks, book.in_flight, book.pending_prompt_tokens) == (10, 1, 160)


def test_a_key_in_use_is_refused() -> None:
    book = ledger()
    book.reserve("a", 1, 1)
    with pytest.raises(ValueError, match="already"):
        book.reserve("a", 1, 1)


def test_a_restart_with_another_capacity_keeps_ours_and_forgets_foreign_use() -> None:
    book = ledger(200)
    book.reserve("a", 320, 320)
    book.set_capacity(KvCapacity(2, 50, 32))
    assert book.view(0.0) is None
    scrape(book, 0)
    view = book.view(0.0)
    assert view is not None
    assert (view.capacity_blocks, view.used_blocks, view.reserved_blocks) == (100, 10, 20)
    book.release("a")
    assert (book.used_blocks, book.reserved_blocks) == (0, 0)


def test_capacity_lost_during_a_scrape_and_found_again_counts_nothing_twice() -> None:
    book = ledger()
    book.reserve("a", 160, 0)
    book.first_byte("a")
    book.begin_scrape()
    book.set_capacity(None)
    book.set_capacity(CAPACITY)
    book.reconcile(10, 0.0)
    assert (book.used_blocks, book.foreign_blocks) == (10, 0)


class _Request:
    """A request in the server of the model below."""

    def __init__(self, prompt: int, expected: int, n: int) -> None:
        self.prompt, self.expected, self.n = prompt, expected, n
        self.admitted = self.begun = False
        self.grown = 0
        self.unseen = 0

    def physical(self) -> int:
        if not self.admitted:
            return 0
        return footprint_blocks(self.prompt, -(-(self.grown + self.unseen) // self.n), self.n, 16)

    def booked(self) -> int:
        return footprint_blocks(self.prompt, -(-self.grown // self.n), self.n, 16)


class SteadyForeign(RuleBasedStateMachine):
    """A server with constant foreign use, and a gateway whose events and scrapes interleave in every way."""

    @initialize(foreign=st.integers(0, 500))
    def start(self, foreign: int) -> None:
        self.foreign = foreign
        self.book = ledger(foreign)
        self.requests: dict[int, _Request] = {}
        self.next = 0
        self.scraping = False
        self.sample: int | None = None

    def _pick(self, index: int) -> tuple[int, _Request]:
        keys = list(self.requests)
        key = keys[index % len(keys)]
        return key, self.requests[key]

    @rule(prompt=st.integers(0, 400), expected=st.integers(0, 200), n=st.integers(1, 3))
    def place(self, prompt: int, expected: int, n: int) -> None:
        self.next += 1
        self.requests[self.next] = _Request(prompt, expected, n)
        self.book.reserve(self.next, prompt, expected, n)

    @precondition(lambda self: self.requests)
    @rule(index=st.integers(0, 50))
    def admit(self, index: int) -> None:
        self._pick(index)[1].admitted = True

    @precondition(lambda self: self.requests)
    @rule(index=st.integers(0, 50))
    def first_byte(self, index: int) -> None:
        key, request = self._pick(index)
        if request.admitted and not request.unseen:
            request.begun = True
            self.book.first_byte(key)

    @precondition(lambda self: self.requests)
    @rule(index=st.integers(0, 50), tokens=st.integers(1, 60))
    def grow(self, index: int, tokens: int) -> None:
        key, request = self._pick(index)
        if request.begun:
            request.grown += tokens
            self.book.grow(key, tokens)
        elif request.admitted and request.unseen + tokens <= request.expected:
            request.unseen += tokens

    @precondition(lambda self: self.requests)
    @rule(index=st.integers(0, 50))
    def release(self, index: int) -> None:
        key, _ = self._pick(index)
        del self.requests[key]
        self.book.release(key)

    @precondition(lambda self: not self.scraping)
    @rule()
    def begin(self) -> None:
        self.scraping, self.sample = True, None
        self.book.begin_scrape()

    @precondition(lambda self: self.scraping)
    @rule()
    def answer(self) -> None:
        self.sample = self.foreign + sum(request.physical() for request in self.requests.values())

    @precondition(lambda self: self.scraping and self.sample is not None)
    @rule()
    def finish(self) -> None:
        self.book.reconcile(self.sample, 0.0)
        self.scraping = False

    @precondition(lambda self: self.scraping)
    @rule()
    def give_up(self) -> None:
        self.scraping = False

    @rule(foreign=st.integers(0, 500), engine_blocks=st.integers(500, 2000))
    def restart(self, foreign: int, engine_blocks: int) -> None:
        """Another process with another capacity: all that ran has failed, and a scrape shows who else is there."""
        capacity = KvCapacity(engines=1, engine_blocks=engine_blocks, block_size_tokens=16)
        if capacity != self.book.capacity:
            self.book.set_capacity(capacity)
            assert self.book.foreign_blocks == self.book.shared_blocks == 0
            assert self.book.view(0.0) is None
            self.requests_end()
            self.foreign = foreign
            scrape(self.book, foreign)
            self.scraping = False

    def requests_end(self) -> None:
        """What ran in the process that is gone has failed; each is released."""
        for key in list(self.requests):
            del self.requests[key]
            self.book.release(key)
        assert (self.book.used_blocks, self.book.reserved_blocks, self.book.pending_prompt_tokens) == (0, 0, 0)

    @invariant()
    def foreign_use_is_right_and_every_block_of_ours_is_counted_once(self) -> None:
        if not hasattr(self, "book"):
            return
        assert self.book.foreign_blocks == self.foreign
        assert self.book.shared_blocks == 0
        assert self.book.used_blocks == self.foreign + sum(request.booked() for request in self.requests.values())
        assert self.book.reserved_blocks >= self.book.used_blocks
        assert self.book.in_flight == len(self.requests)
        assert self.book.pending_prompt_tokens == sum(r.prompt for r in self.requests.values() if not r.begun)


SteadyForeign.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_steady_foreign = SteadyForeign.TestCase


@given(
    sizes=st.lists(st.integers(1, 600), max_size=8),
    shared=st.integers(0, 400),
    foreign=st.lists(st.integers(0, 300), min_size=1, max_size=4),
)
def test_a_quiet_scrape_makes_use_exact_whatever_is_shared_or_foreign(
    sizes: list[int], shared: int, foreign: list[int]
) -> None:
    book = ledger()
    for key, tokens in enumerate(sizes):
        book.reserve(key, tokens, 0)
        book.first_byte(key)
    ours = [footprint_blocks(tokens, 0, 1, 16) for tokens in sizes]
    least = max(ours, default=0)
    physical = max(least, sum(ours) - shared)
    for use in foreign:
        scrape(book, physical + use)
        assert book.used_blocks == physical + use
    # Releases never make the ledger believe in more free blocks than there are for sure.
    for key, blocks in enumerate(ours):
        before = book.used_blocks
        book.release(key)
        assert before - blocks <= book.used_blocks <= before


@given(st.data())
def test_when_all_are_released_a_scrape_of_zero_leaves_nothing(data: st.DataObject) -> None:
    book = ledger(data.draw(st.integers(0, 1000)))
    count = data.draw(st.integers(0, 10))
    for key in range(count):
        book.reserve(key, data.draw(st.integers(0, 5000)), data.draw(st.integers(0, 500)), data.draw(st.integers(1, 4)))
        if data.draw(st.booleans()):
            book.first_byte(key)
        book.grow(key, data.draw(st.integers(0, 900)))
        if data.draw(st.booleans()):
            scrape(book, data.draw(st.integers(0, 1000)))
    for key in data.draw(st.permutations(range(count))):
        book.release(key)
    scrape(book, 0)
    assert (book.used_blocks, book.reserved_blocks, book.in_flight, book.pending_prompt_tokens) == (0, 0, 0, 0)
    assert (book.foreign_blocks, book.shared_blocks) == (0, 0)


def test_a_prompt_that_should_be_done_is_waited_for_no_more_and_counted_once() -> None:
    """Of an answer that is not streamed no first byte tells; its blocks stay as unsure as they were."""
    ledger = Ledger()
    ledger.reserve("whole", 1000, 10, cached_tokens=200)
    ledger.reserve("stream", 500, 10)
    assert ledger.pending_prompt_tokens == 1300
    ledger.prefilled("whole")
    ledger.prefilled("whole")
    assert ledger.pending_prompt_tokens == 500
    ledger.first_byte("whole")
    assert ledger.pending_prompt_tokens == 500
    ledger.release("whole")
    ledger.first_byte("stream")
    ledger.prefilled("stream")
    assert ledger.pending_prompt_tokens == 0
    ledger.prefilled("nobody")
