"""What a request is told that found no place says what happened to it."""

from __future__ import annotations

import pytest

from gateway.relay.refusals import refusal
from gateway.types import Group, Need, Offer, Refused, Waiter

GROUPS = (Group((Offer("a", 32768, None, False),), Need(160, 16)),)


@pytest.mark.parametrize(
    ("tag", "words"),
    [
        (None, "No KV cache had room for the request within 12 s. Try again later."),
        (5.0, "A backend sent the request back, and within 12 s no other had room. Try again later."),
    ],
)
def test_a_wait_that_was_in_vain_is_told_from_one_after_a_backend_had_it(tag: float | None, words: str) -> None:
    waiter = Waiter(1, arrived_s=100.0, deadline_s=112.0, groups=GROUPS, tag=tag)
    error = refusal(waiter, Refused(1, "timeout"), {}, 112.0, 3.0)
    assert str(error) == words
