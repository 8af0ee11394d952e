"""What is known of prefix caches, guessed (``prefixes``) or reported (``blocks``), and what it ties requests to."""

from __future__ import annotations

from gateway.routing.blocks import BlockIndex
from gateway.routing.costs import SESSION_S, Bonds, adapter_s
from gateway.routing.entries import Entry
from gateway.routing.prefixes import Chain, PrefixIndex, thinned
from gateway.routing.rooms import Room
from gateway.types import BackendView


class Caches:
    """The prefix caches of all backends, which are bits of a mask."""

    def __init__(self) -> None:
        self.prefixes = PrefixIndex()
        self.blocks = BlockIndex()
        self._caching = 0  # the backends that keep prefixes

    def __repr__(self) -> str:
        return f"<Caches {self.prefixes!r} {self.blocks!r}>"

    def changed(self, room: Room, before: BackendView) -> None:
        """A backend is another one than before: perhaps its cache is another one, too, and empty."""
        view = room.view
        self._caching = self._caching | room.bit if view.caches else self._caching & ~room.bit
        size = (0, 0) if before.kv is None else (before.kv.capacity_blocks, before.kv.block_size_tokens)
        if view.epoch != before.epoch or size != (room.capacity, room.size):
            self.prefixes.clear(room.bit, room.capacity * room.size * view.engines)
        if view.epoch != before.epoch:
            self.blocks.gone(room.bit)

    def match(self, entry: Entry) -> None:
        """Look up which backends have the prompt's beginning, if that may have changed."""
        state = self.prefixes.changes + self.blocks.changes
        if entry.matched_at == state:
            return
        entry.matched_at = state
        waiter, mask = entry.waiter, entry.mask & self._caching
        if entry.chain:
            entry.matched = self.prefixes.match(entry.chain, mask)
        elif waiter.session:
            bit, tokens = self.prefixes.last(waiter.session)
            entry.matched = {bit: min(tokens, waiter.groups[0].need.prompt_tokens)} if bit & mask else {}
        if waiter.blocks is not None:
            entry.matched = self.blocks.refine(entry.matched, waiter.blocks, mask)

    def bonds(self, entry: Entry) -> Bonds | None:
        """What ties the request to some backends; ``None`` if nothing can."""
        waiter = entry.waiter
        if not (entry.chain or waiter.blocks or waiter.session or waiter.adapter):
            return None
        self.match(entry)
        extra_s: dict[int, float] = {}
        if waiter.adapter:
            for option in entry.options:
                extra_s.update((room.bit, adapter_s(room, waiter.model)) for room in option.rooms)
        if waiter.session:
            bit = self.prefixes.last(waiter.session)[0]
            extra_s[bit] = extra_s.get(bit, 0.0) - SESSION_S
        return Bonds(self._trusted(entry.matched), extra_s, entry.chain)

    def placed(self, entry: Entry, room: Room, prompt_tokens: int, matched_tokens: int) -> None:
        """The request goes there: its prompt will be in the cache."""
        waiter = entry.waiter
        if entry.chain:
            self.prefixes.add(room.bit, entry.chain)
        if waiter.blocks is not None:
            self.blocks.expect(room.bit, waiter.blocks, matched_tokens)
        if waiter.session:
            self.prefixes.went(waiter.session, room.bit, prompt_tokens)

    def answered(self, bit: int, output_tokens: int, matched_tokens: int, cached_tokens: int | None) -> None:
        """A request placed with ``matched_tokens`` was answered; ``cached_tokens`` as its answer tells."""
        if output_tokens:
            self.prefixes.occupy(bit, output_tokens)
        if cached_tokens is not None:
            index = self.blocks if self.blocks.knows(bit) else self.prefixes
            index.check(bit, matched_tokens, cached_tokens)

    def counted(self, bit: int, guessed_tokens: int, cached_tokens: int, answers: int) -> None:
        """What a backend's prefix-cache counters say of the prompts of ``answers``, where those do not tell it."""
        if not self.blocks.knows(bit):
            self.prefixes.check_counters(bit, guessed_tokens, cached_tokens, answers)

    def unanswered(self, bit: int, chain: Chain, model: str, matched_tokens: int) -> None:
        """A request was never answered: its prompt is not in the cache there."""
        if chain:
            self.prefixes.forget(bit, thinned(chain, model), matched_tokens)

    def _trusted(self, matched: dict[int, int]) -> dict[int, int]:
        """What was found of a prompt, as far as what is known of each backend's cache came true."""
        guessed, reported = self.prefixes.trusts, self.blocks.trusts
        if not (guessed or reported):
            return matched
        if self.blocks.silent and not reported:
            return {bit: int(tokens * guessed.get(bit, 1.0)) for bit, tokens in matched.items()}
        knows = self.blocks.knows
        return {
            bit: int(tokens * (reported if knows(bit) else guessed).get(bit, 1.0)) for bit, tokens in matched.items()
        }
