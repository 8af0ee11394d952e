"""The model that a backend serves, as ``kvgate count`` asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.tokens.service import ServedModel

TIMEOUT_S = 30.0


class BadInput(Exception):
    """What was asked for cannot be done; the message says why."""


async def served(url: str, wanted: str, must: bool, key: str | None = None) -> ServedModel:
    """The model ``wanted`` at the backend, or its only one unless ``wanted`` must be it. Raises ``BadInput``, and
    ``BackendFailed`` where there is no list of models."""
    from pydantic import SecretStr

    from gateway.config import BackendSettings
    from gateway.exceptions import BackendFailed
    from gateway.fleet.discovery import ProbeFailed, cards_at
    from gateway.tokens.service import ServedModel

    try:
        backend = BackendSettings(url=url, api_key=SecretStr(key) if key else None)
    except ValueError:
        raise BadInput(f"--backend {url} is not an http(s) URL") from None
    base = backend.url
    try:
        cards = await cards_at(backend, TIMEOUT_S)
    except ProbeFailed as error:
        raise BackendFailed(f"{base}/v1/models gave no list of models: {error}") from None
    if wanted not in cards and (must or len(cards) != 1):
        raise BadInput(f"{base} does not serve {wanted}; it serves: {', '.join(cards) or 'nothing'} (see --model)")
    card = cards.get(wanted) or next(iter(cards.values()))
    owner = cards.get(card.parent or "", card)  # a LoRA adapter is counted as its base model
    return ServedModel(card.id, owner.root or owner.id, (base,))
