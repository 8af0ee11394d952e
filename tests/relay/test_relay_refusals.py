"""What a request is told that found no place says what happened to it."""

from __future__ import annotations

import pytest

from gateway.exceptions import NoBackend
from gateway.relay.refusals import refusal
from gateway.types import BackendView, Condition, Group, Health, Need, Offer, Refused, Waiter

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


def test_who_was_kept_out_is_told_that_room_was_kept_for_others() -> None:
    waiter = Waiter(1, arrived_s=100.0, deadline_s=105.0, groups=GROUPS)
    error = refusal(waiter, Refused(1, "kept_out"), {}, 105.0, 3.0)
    room = "No KV cache had room for the request within 5 s beside what is kept for conversations about to return."
    assert str(error) == f"{room} Try again later."


STANDING = (
    ({"a": Condition.DOWN}, "a is down", 5.0),
    ({"a": Condition.STARTING}, "a is still starting", 10.0),
    ({"a": Condition.ASLEEP}, "a is asleep", 15.0),
    ({"a": Condition.DRAINING, "b": Condition.DOWN}, "a is draining, b is down", 5.0),
    ({"a": Condition.ASLEEP, "b": Condition.STARTING}, "a is asleep, b is still starting", 10.0),
    ({"a": Condition.UP, "b": Condition.DOWN}, "a does not serve it any more, b is down", 5.0),
    ({"a": Condition.DOWN, "excluded": Condition.UP}, "a is down, excluded has failed this request", 5.0),
    (
        dict.fromkeys("abcdefg", Condition.FAILING),
        "a is failing, b is failing, c is failing, d is failing, and 3 more",
        5.0,
    ),
)


@pytest.mark.parametrize(("conditions", "words", "retry_after_s"), STANDING)
def test_a_request_that_no_backend_takes_is_told_how_each_of_them_stands(
    conditions: dict[str, Condition], words: str, retry_after_s: float
) -> None:
    offers = tuple(Offer(name, 32768, None, False) for name in conditions)
    waiter = Waiter(1, 0.0, 9.0, (Group(offers, Need(160, 16)),), frozenset({"excluded"}))
    views = {
        name: BackendView(name, "http://x", Health.DOWN, {}, 0, condition=condition)
        for name, condition in conditions.items()
    }
    error = refusal(waiter, Refused(1, "no_backend"), views, 1.0, 3.0)
    assert isinstance(error, NoBackend)
    assert str(error) == f"No backend that serves the model takes requests: {words}. Try again later."
    assert error.retry_after_s == retry_after_s
