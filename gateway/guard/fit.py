"""Whether a request fits a window, where, and with what output budget. Pure arithmetic, no I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.config import FittingSettings
from gateway.types import Ask, Count, CountKind, Dialect, Fits, Offer, Overflow, Verdict

# vLLM gives a completion without max_tokens this many, in every version.
COMPLETIONS_DEFAULT_TOKENS = 16

# An estimate may be this much too low (1/8), so a budget clamped by one leaves so much of the prompt unspent.
ESTIMATE_MARGIN = 8


def fit(
    ask: Ask, count: Count, windows: Mapping[str, int], settings: FittingSettings, floor_tokens: int | None = None
) -> Verdict:
    """The backends that hold ``ask``, best first, each with the output budget it would get; or an overflow.

    ``windows``: backend name → window of the asked model in tokens, at least one. ``floor_tokens`` overrides
    ``settings.output_floor_tokens``.

    An exact count decides. An upper bound may accept but not reject, an estimate neither: what they say does not fit is
    offered to the largest window all the same, and the backend judges. So it does for pooling: with chunked processing
    vLLM takes longer inputs than the window, and does not say so.

    A budget is lowered to what the window leaves, always: vLLM < 0.32 refuses prompt + budget > window, and every
    version refuses budget > window. It is never lowered below the output floor, which is the configured one, or the
    budget asked for if that is smaller, or ``min_tokens``; and at most half a window, so that a small one stays usable.
    A chat that names no budget is left alone: vLLM gives it the rest.
    Raises ``ValueError`` if ``windows`` is empty.
    """
    if not windows:
        raise ValueError("no windows to fit into")
    sizes = _Sizes(ask, count, settings.output_floor_tokens if floor_tokens is None else floor_tokens)
    fitting = [(name, window) for name, window in windows.items() if sizes.left(window) >= sizes.floor(window)]
    if fitting:
        fitting.sort(key=lambda item: _preference(sizes, item, settings.comfortable_output_tokens))
        return Fits(tuple(sizes.offer(name, window) for name, window in fitting))
    largest = max(windows.values())
    if count.kind is CountKind.EXACT and ask.dialect is not Dialect.POOLING:
        return sizes.overflow(largest)
    names = sorted(name for name, window in windows.items() if window == largest)
    return Fits(tuple(sizes.blind_offer(name, largest) for name in names))


class _Sizes:
    """The sizes of one request, as each window sees them."""

    __slots__ = ("_count", "_floor", "_minimum", "_truncate", "asked", "generates")

    def __init__(self, ask: Ask, count: Count, floor_tokens: int) -> None:
        self.generates = ask.dialect not in (Dialect.OTHER, Dialect.POOLING)
        self.asked = ask.output_tokens if self.generates else None
        if ask.dialect is Dialect.POOLING:
            self.asked = 0
        if self.asked is None and ask.dialect is Dialect.COMPLETIONS:
            self.asked = COMPLETIONS_DEFAULT_TOKENS
        self._floor = floor_tokens
        self._minimum = ask.min_output_tokens
        self._count = count
        self._truncate = ask.truncate_prompt_tokens

    def prompt(self, window: int) -> int:
        """Prompt tokens after vLLM's own truncation, if the client asked for it: -1 is all of the window but one."""
        if self._truncate is None:
            return self._count.tokens
        most = self._truncate if self._truncate >= 0 else window - (1 if self.generates else 0)
        return min(self._count.tokens, most)

    def left(self, window: int) -> int:
        """Tokens of the window after the prompt; negative if it does not fit."""
        return window - self.prompt(window)

    def floor(self, window: int) -> int:
        """The smallest acceptable output; at least 1 if there is any output at all."""
        if not self.generates:
            return 0
        minimum = self._minimum if self._minimum < window else 0  # the backend refuses it, whatever the prompt
        floor = max(min(self._floor, window // 2), minimum)
        return max(1, floor if self.asked is None else min(floor, self.asked))

    def margin(self, window: int) -> int:
        """Tokens by which the prompt may be longer than counted."""
        return -(-self.prompt(window) // ESTIMATE_MARGIN) if self._count.kind is CountKind.ESTIMATE else 0

    def offer(self, name: str, window: int) -> Offer:
        """The offer of a window that holds prompt and floor."""
        if self.asked is None or self.asked <= self.left(window):
            return Offer(name, window, self.asked, clamped=False)
        budget = max(self.floor(window), self.left(window) - self.margin(window))
        return Offer(name, window, budget, clamped=True)

    def blind_offer(self, name: str, window: int) -> Offer:
        """The offer of a window that may be too small.

        The budget stays as it is, so that the backend's own count decides; only one beyond the window, refused whatever
        the prompt, becomes half of it.
        """
        if self.asked is None or self.asked <= window:
            return Offer(name, window, self.asked, clamped=False)
        return Offer(name, window, max(self.floor(window), window // 2), clamped=True)

    def overflow(self, window: int) -> Overflow:
        """The numbers of a request that the largest window cannot hold."""
        floor = self.floor(window)
        output = floor if self.asked is None else self.asked
        return Overflow(self.prompt(window), output, window, max(0, window - floor))


def _preference(sizes: _Sizes, item: tuple[str, int], comfortable_tokens: int) -> tuple[bool, int, str]:
    """Roomy windows first, the smallest of them in front, so that large ones stay free; then by room left."""
    name, window = item
    left = sizes.left(window) - sizes.margin(window)
    wanted = comfortable_tokens if sizes.asked is None else min(sizes.asked, comfortable_tokens)
    if not sizes.generates:
        wanted = 0
    roomy = left >= wanted
    return (not roomy, window if roomy else -left, name)
