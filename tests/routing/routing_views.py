"""Short ways to say what a backend looks like and what a request wants."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from gateway.types import BackendView, Group, Health, KvView, Need, Offer, Waiter

NOW_S = 100.0


def kv(reserved: int = 0, capacity: int = 1000, engine_capacity: int | None = None) -> KvView:
    return KvView(capacity, engine_capacity or capacity, 16, reserved, reserved, 0.5)


def backend(name: str, window: int = 32768, **fields: Any) -> BackendView:
    """An idle backend with 1,000 free blocks of 16 tokens unless said otherwise."""
    defaults: dict[str, Any] = {
        "health": Health.UP,
        "windows": {"m": window},
        "in_flight": 0,
        "kv": kv(),
        "running": 0,
        "waiting": 0,
    }
    return BackendView(name, f"http://{name}", **(defaults | fields))


def busy(name: str, reserved: int, **fields: Any) -> BackendView:
    """A backend with requests on it."""
    return backend(name, **({"kv": kv(reserved), "in_flight": 2, "running": 2} | fields))


def waiter(sequence: int, *names: str, tokens: int = 160, **fields: Any) -> Waiter:
    """A request of ``tokens`` prompt tokens with an offer from each name, or from ``(name, window)``."""
    output = fields.pop("output", 0)
    offers = fields.pop("offers", None) or tuple(Offer(name, 32768, None, False) for name in names)
    return Waiter(
        sequence=sequence,
        arrived_s=fields.pop("arrived_s", NOW_S - 1),
        deadline_s=fields.pop("deadline_s", NOW_S + 10),
        groups=groups(offers, tokens, output),
        **fields,
    )


def groups(offers: tuple[Offer, ...], tokens: int, output: int) -> tuple[Group, ...]:
    """The offers by window, as they follow each other, each needing the same."""
    runs = groupby(offers, key=lambda offer: offer.window_tokens)
    return tuple(Group(tuple(run), Need(tokens, output)) for _, run in runs)


def offer(name: str, window: int = 32768) -> Offer:
    return Offer(name, window, None, False)
