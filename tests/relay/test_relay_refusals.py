"""Why a request is not placed, in words: what its backends are, and when to try again."""

from __future__ import annotations

import pytest

from gateway.exceptions import GatewayError, NoBackend
from gateway.relay.refusals import refusal
from gateway.types import BackendView, Condition, Group, Health, Need, Offer, Refused, Waiter


def refused(**conditions: Condition) -> GatewayError:
    offers = tuple(Offer(name, 1000, 10, False) for name in conditions)
    waiter = Waiter(1, 0.0, 9.0, (Group(offers, Need(10, 10)),))
    views = {
        name: BackendView(name, "", Health.DOWN, {}, 0, condition=condition) for name, condition in conditions.items()
    }
    return refusal(waiter, Refused(1, "no_backend"), views, 1.0, 7.0)


@pytest.mark.parametrize(
    ("conditions", "words", "retry_s"),
    [
        ((Condition.DOWN,), "is down or draining", 5.0),
        ((Condition.ASLEEP,), "is asleep", 15.0),
        ((Condition.STARTING, Condition.STARTING), "is still starting", 10.0),
        ((Condition.ASLEEP, Condition.STARTING), "is asleep or still starting", 10.0),
        ((Condition.ASLEEP, Condition.DOWN), "is down, draining, asleep or still starting", 10.0),
    ],
)
def test_it_says_how_all_of_them_stand(conditions: tuple[Condition, ...], words: str, retry_s: float) -> None:
    error = refused(**{f"b{place}": each for place, each in enumerate(conditions)})
    assert isinstance(error, NoBackend)
    assert f"Every backend that could take the request {words}. " in error.message
    assert error.retry_after_s == retry_s
