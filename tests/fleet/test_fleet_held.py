"""What requests in flight share of their prompts is counted once, as vLLM's prefix cache holds it once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.capacity import KvCapacity
from gateway.fleet.held import Chain, Held
from gateway.fleet.ledger import Ledger

SIZE = 16
LINKS_TOKENS = (70, 150, 400, 1000)


def chain_of(path: tuple[int, ...]) -> Chain:
    """The chain of a prompt that takes these turns: prompts share links as long as their turns are the same."""
    return tuple((hash(path[: end + 1]), LINKS_TOKENS[end]) for end in range(len(path)))


paths = st.lists(st.integers(0, 2), max_size=len(LINKS_TOKENS)).map(tuple)


def distinct_blocks(held: list[tuple[int, ...]], size: int) -> int:
    """Blocks of full links over all prompts, each once: what vLLM holds."""
    blocks: dict[tuple[int, ...], int] = {}
    for path in held:
        before = 0
        for end in range(len(path)):
            blocks[path[: end + 1]] = LINKS_TOKENS[end] // size - before
            before = LINKS_TOKENS[end] // size
    return sum(blocks.values())


@given(st.lists(st.tuples(paths, st.booleans())), st.sampled_from([1, 16, 100]))
def test_the_overlap_is_what_is_counted_more_than_once(moves: list[tuple[tuple[int, ...], bool]], size: int) -> None:
    held, there = Held(size), []
    for path, leaves in moves:
        if leaves and there:
            held.drop(chain_of(there.pop(0)))
        else:
            held.take(chain_of(path))
            there.append(path)
        each = sum(LINKS_TOKENS[len(path) - 1] // size for path in there if path)
        assert each - held.overlap_blocks == distinct_blocks(there, size)
    for path in there:
        held.drop(chain_of(path))
    assert (len(held), held.overlap_blocks) == (0, 0)


@given(st.lists(paths), paths)
def test_what_a_new_prompt_shares_ends_at_the_last_common_link(
    there: list[tuple[int, ...]], path: tuple[int, ...]
) -> None:
    held = Held(SIZE)
    for other in there:
        held.take(chain_of(other))
    common = max(
        (
            end + 1
            for other in there
            for end in range(min(len(other), len(path)))
            if other[: end + 1] == path[: end + 1]
        ),
        default=0,
    )
    for guess in range(len(path) + 1):
        assert held.shared_links(chain_of(path), guess) == common
    assert held.shared_tokens(chain_of(path)) == (LINKS_TOKENS[common - 1] if common else 0)


def test_two_requests_with_one_beginning_hold_it_once_and_the_last_to_leave_frees_it() -> None:
    book = Ledger()
    book.set_capacity(KvCapacity(1, 1000, SIZE))
    book.begin_scrape()
    book.reconcile(0, 0.0)
    shared, first, second = (1, 1600), (2, 3200), (3, 2400)
    book.reserve("a", 3200, 0, chain=(shared, first))
    book.reserve("b", 2400, 0, chain=(shared, second))
    assert (book.used_blocks, book.shared_blocks) == (200 + 50, 100)
    book.first_byte("a")
    book.first_byte("b")
    book.begin_scrape()
    book.reconcile(250, 1.0)  # as vLLM counts them
    assert (book.used_blocks, book.foreign_blocks, book.shared_blocks) == (250, 0, 100)
    book.release("a")
    assert (book.used_blocks, book.shared_blocks) == (150, 0)
    book.release("b")
    assert (book.used_blocks, book.reserved_blocks) == (0, 0)


def test_what_is_shared_stays_right_when_the_backend_comes_back_with_other_blocks() -> None:
    book = Ledger()
    book.set_capacity(KvCapacity(1, 1000, 16))
    for key in "abc":
        book.reserve(key, 1600, 0, chain=((1, 1600),))
    assert book.used_blocks == 100
    book.set_capacity(KvCapacity(1, 500, 32))
    assert (book.used_blocks, book.shared_blocks) == (50, 100)
    for key in "abc":
        book.release(key)
    assert (book.used_blocks, book.shared_blocks) == (0, 0)
