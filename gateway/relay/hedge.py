"""When a request that got no first byte is sent to a second backend, too: after how long, how often, and which.

"Too long" is learned: of each stream it is noted how its first byte's time compares with what its backend's prompt
rate let expect (``Rates.expected_s``). A quantile of these ratios, times what is expected of a request, is a time that
few requests of its size take. So a long prompt is not taken for a stuck one, nor a slow backend for a broken one.
"""

from __future__ import annotations

from collections import deque

from gateway.config import RelaySettings
from gateway.relay.retries import RetryBudget
from gateway.types import Ask, Dialect, TextPrompts, TokenPrompts

# So many second attempts may be made at once before the share counts.
AT_ONCE = 10.0
# Below this the ratio says more of the noise of a busy loop than of a backend.
LEAST_EXPECTED_S = 0.05
REMEMBERED = 512
LEAST_REMEMBERED = 50
# The quantile is taken anew after so many first bytes.
RENEWED_EACH = 32


class FirstBytes:
    """How many times as long as expected first bytes took, of late."""

    __slots__ = ("_factor", "_quantile", "_ratios", "_since")

    def __init__(self, quantile: float) -> None:
        self._quantile = quantile
        self._ratios: deque[float] = deque(maxlen=REMEMBERED)
        self._factor: float | None = None
        self._since = 0

    def note(self, expected_s: float, took_s: float) -> None:
        """A first byte came after ``took_s``, or had not come by then."""
        self._ratios.append(took_s / max(expected_s, LEAST_EXPECTED_S))
        self._since += 1
        if len(self._ratios) >= LEAST_REMEMBERED and (self._factor is None or self._since >= RENEWED_EACH):
            ordered = sorted(self._ratios)
            self._factor = ordered[min(len(ordered) - 1, int(self._quantile * len(ordered)))]
            self._since = 0

    def longest_s(self, expected_s: float) -> float | None:
        """What few take longer than; ``None`` before enough is known."""
        return None if self._factor is None else self._factor * max(expected_s, LEAST_EXPECTED_S)


class HedgePolicy:
    """Whether, and after how long, a request may be sent a second time. ``budget``: how many of all may."""

    def __init__(self, settings: RelaySettings) -> None:
        self._settings = settings
        self._first_bytes = FirstBytes(settings.hedge_quantile)
        self.on = settings.hedge != "never"
        self.budget = RetryBudget(settings.hedge_share, AT_ONCE)

    def delay_s(self, ask: Ask, expected_s: float | None) -> float | None:
        """Wait for a first byte before ``ask`` is sent a second time; ``None`` if it is not to be.

        ``expected_s``: when its backend should begin to answer. Once a stream's status is sent, with the name of its
        backend, it is too late; so a delay beyond ``hold_headers_s`` is none.
        """
        settings = self._settings
        if not self.on or not may_be_sent_twice(ask):
            return None
        delay_s: float | None = settings.hedge_after_s
        if settings.hedge == "learned":
            learned_s = None if expected_s is None else self._first_bytes.longest_s(expected_s)
            delay_s = None if learned_s is None else max(settings.hedge_after_s, learned_s)
        return None if delay_s is None or delay_s >= settings.hold_headers_s else delay_s

    def note(self, expected_s: float | None, took_s: float) -> None:
        """The first byte of a stream came after ``took_s``, or had not come by then."""
        if expected_s is not None:
            self._first_bytes.note(expected_s, took_s)


def may_be_sent_twice(ask: Ask) -> bool:
    """Whether a second backend may work on it, too: its first byte tells that it runs, and it leaves nothing behind.

    Several answers at once (``n``, lists of prompts) would cost as many times more. A response that is stored, or goes
    on from a stored one, belongs to one backend; so does a prompt whose KV cache is moved (``kv_transfer_params``).
    """
    if not (ask.stream and ask.counted) or ask.n > 1 or ask.dialect in (Dialect.POOLING, Dialect.OTHER):
        return False
    prompt, document = ask.prompt, ask.document
    if isinstance(prompt, TextPrompts) and len(prompt.texts) > 1:
        return False
    if isinstance(prompt, TokenPrompts) and len(prompt.lengths) > 1:
        return False
    if document.get("kv_transfer_params") is not None:
        return False
    if ask.dialect is Dialect.RESPONSES:
        if document.get("store") is not False or document.get("background"):
            return False
        return document.get("previous_response_id") is None
    return True
