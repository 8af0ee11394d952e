"""Where a reader stands in a publisher's numbered messages: what is next, twice, missed, or of another publisher."""

from __future__ import annotations

from enum import StrEnum


class Step(StrEnum):
    """What a message is."""

    NEXT = "next"
    AGAIN = "again"  # known already
    GAP = "gap"  # there were others before it
    RESTART = "restart"  # the publisher counts from 0 again


class Sequence:
    """The last message that was taken in: its number (−1: none), its time at the publisher, and a digest of it.

    A publisher that was started anew counts from 0. Its numbers may have reached ours by the time we hear of it, so
    whether the last message is still known to it under that number tells for sure (``is_last``).
    """

    __slots__ = ("_digest", "_sent_s", "number")

    def __init__(self) -> None:
        self.forget()

    def __repr__(self) -> str:
        return f"<Sequence at {self.number}>"

    def forget(self) -> None:
        """Nothing was taken in."""
        self.number = -1
        self._sent_s = 0.0
        self._digest = 0

    def look(self, number: int, sent_s: float) -> Step:
        """What a message of that number is."""
        if number == self.number + 1:
            return Step.NEXT
        if number > self.number:
            return Step.GAP
        return Step.RESTART if sent_s > self._sent_s else Step.AGAIN

    def skip(self, number: int) -> None:
        """What comes before that number is given up."""
        self.number = number - 1
        self._digest = 0

    def is_last(self, number: int, payload: bytes) -> bool:
        """Whether that is the message taken in last."""
        return number == self.number and hash(payload) == self._digest

    def take(self, number: int, sent_s: float, payload: bytes) -> None:
        """It was taken in."""
        self.number, self._sent_s, self._digest = number, sent_s, hash(payload)
