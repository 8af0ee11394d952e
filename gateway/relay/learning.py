"""What answers teach placing: how long they become, and what of their prompts is in which cache."""

from __future__ import annotations

from gateway.routing.lengths import OutputLengths
from gateway.routing.need import budget_tokens
from gateway.routing.placer import Placer
from gateway.types import Need, Offer, Waiter


class Learner:
    """Is told by each lease what became of it."""

    def __init__(self, placer: Placer, quantile: float) -> None:
        self._placer = placer
        self._quantile = quantile
        self._lengths = OutputLengths()

    def expected_tokens(self, model: str, flow: str) -> int | None:
        """What most answers of a model (to that flow) do not exceed; ``None`` before enough is known."""
        return self._lengths.expected(model, flow, self._quantile)

    def learned(self) -> dict[str, int]:
        """The same by model, where enough was learned."""
        return self._lengths.learned(self._quantile)

    def answered(
        self,
        waiter: Waiter,
        offer: Offer,
        need: Need,
        matched_tokens: int,
        output_tokens: int | None,
        cached_tokens: int | None,
    ) -> None:
        """An answer came to its end; its usage tells so many output tokens, and cached ones of the prompt."""
        self._placer.answered(offer.backend, output_tokens or 0, matched_tokens, cached_tokens)
        if output_tokens is not None:
            each_tokens = output_tokens // need.n
            ended = each_tokens < budget_tokens(offer, need.prompt_tokens)
            self._lengths.note(waiter.model, waiter.flow, each_tokens, ended)

    def left(self, offer: Offer, tokens: int, now_s: float) -> None:
        """A request is over: so many tokens of its own, or that it came back for in vain, stay in the cache there."""
        self._placer.left(offer.backend, tokens, now_s)

    def broken_off(
        self, waiter: Waiter, offer: Offer, need: Need, matched_tokens: int, begun: bool, grown_tokens: int
    ) -> None:
        """An answer did not end, or never began."""
        if begun:
            each_tokens = grown_tokens // need.n
            self._lengths.note(waiter.model, waiter.flow, each_tokens, False)
        else:
            self._placer.unanswered(offer.backend, waiter.chain, waiter.model, matched_tokens)
