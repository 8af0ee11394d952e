"""What is reserved for running requests is the most they will hold together, and never less."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.capacity import KvCapacity
from gateway.fleet.ledger import Ledger
from gateway.fleet.peaks import BUCKETS, Peaks, bucket_of

SIZE = 16

running = st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 3000)), max_size=12)


def held_at(step: int, requests: list[tuple[int, int]]) -> int:
    """Blocks in use after so many tokens each: ``(tokens now, tokens to go)``; who is done is gone the step after."""
    return sum(math.ceil((now + step) / SIZE) for now, to_go in requests if step <= to_go)


@given(running)
def test_requests_that_decode_side_by_side_never_hold_more_than_the_peak(requests: list[tuple[int, int]]) -> None:
    peaks = Peaks()
    for now, to_go in requests:
        peaks.add(bucket_of(to_go), math.ceil(now / SIZE), 1)
    ends = {to_go for _, to_go in requests} | {0}
    truth = max(held_at(step, requests) for step in ends)  # use only grows from one end to the next
    assert peaks.most_blocks(SIZE) >= truth
    # Buckets are half an octave wide, and every sequence may begin one more block.
    slack = sum(math.ceil(0.42 * to_go / SIZE) + 2 for _, to_go in requests)
    assert peaks.most_blocks(SIZE) <= truth + slack


@given(running)
def test_who_left_is_not_counted(requests: list[tuple[int, int]]) -> None:
    peaks = Peaks()
    for sign in (1, -1):
        for now, to_go in requests:
            peaks.add(bucket_of(to_go), sign * math.ceil(now / SIZE), sign)
    assert peaks.most_blocks(SIZE) == 0


def test_a_bucket_is_never_too_low() -> None:
    peaks = [Peaks() for _ in range(BUCKETS)]
    for bucket, item in enumerate(peaks):
        item.add(bucket, 0, 1)
    most = [item.most_blocks(1) for item in peaks]
    assert most == sorted(most)
    for tokens in [*range(200), 4095, 4096, 4097, 1_000_000]:
        assert most[bucket_of(tokens)] >= tokens


def book_of(certain: bool = False) -> Ledger:
    book = Ledger(certain=certain)
    book.set_capacity(KvCapacity(1, 10_000, SIZE))
    book.begin_scrape()
    book.reconcile(0, 0.0)
    return book


def test_one_that_ends_before_another_has_grown_leaves_it_its_blocks() -> None:
    book = book_of()
    book.reserve("long prompt, short answer", 16_000, 16)
    book.reserve("short prompt, long answer", 160, 8_192)
    assert book.used_blocks == 1000 + 10
    # One block more each until the first is done; then the other has all its place.
    assert book.reserved_blocks == 1012
    assert book_sum(book) == 1001 + 522


def test_an_operator_who_wants_certainty_gets_the_sum() -> None:
    book = book_of(certain=True)
    book.reserve("long prompt, short answer", 16_000, 16)
    book.reserve("short prompt, long answer", 160, 8_192)
    assert book.reserved_blocks == 1001 + 522


def test_one_request_alone_is_expected_to_hold_exactly_what_it_will_hold() -> None:
    book = book_of()
    book.reserve("a", 100, 1000)
    assert book.reserved_blocks == math.ceil(1100 / SIZE)


def test_answers_that_outgrow_what_was_expected_are_reserved_anew() -> None:
    book = book_of()
    for key in "ab":
        book.reserve(key, 1600, 16)
        book.first_byte(key)
    assert book.reserved_blocks == 202
    book.grow("a", 17)  # 32 are expected now
    assert (book.used_blocks, book.reserved_blocks) == (202, 203)


def book_sum(book: Ledger) -> int:
    """What all would hold at their ends, were none gone by then."""
    return sum(entry.peak_blocks for entry in book._entries.values())
