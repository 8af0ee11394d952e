"""The model that a backend serves, as ``kvgate count`` asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gateway.tokens.service import ServedModel

TIMEOUT_S = 30.0


class BadInput(Exception):
    """What was asked for cannot be done; the message says why."""


async def served(client: Any, url: str, wanted: str, must: bool, key: str | None = None) -> ServedModel:
    """The model ``wanted`` at the backend, or its only one unless ``wanted`` must be it."""
    import httpx2

    from gateway.config import BackendSettings
    from gateway.exceptions import BackendFailed
    from gateway.tokens.service import ServedModel

    try:
        base = BackendSettings(url=url).url
    except ValueError:
        raise BadInput(f"--backend {url} is not an http(s) URL") from None
    try:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        response = await client.get(f"{base}/v1/models", headers=headers)
        cards = {card["id"]: card for card in response.json()["data"]}
    except (httpx2.HTTPError, ValueError, KeyError, TypeError) as error:
        raise BackendFailed(f"{base}/v1/models gave no list of models: {str(error) or type(error).__name__}") from None
    if wanted not in cards and (must or len(cards) != 1):
        raise BadInput(f"{base} does not serve {wanted}; it serves: {', '.join(cards) or 'nothing'} (see --model)")
    card = cards.get(wanted) or next(iter(cards.values()))
    owner = cards.get(card.get("parent") or "", card)  # a LoRA adapter is counted as its base model
    return ServedModel(card["id"], owner.get("root") or owner["id"], (base,))
