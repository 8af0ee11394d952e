"""The lists of models, with the window under every name that a client looks for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gateway.api.errors import encode

# Some clients plan with window - output, so the output shown must leave most of the window to the prompt.
_OUTPUT_SHARE = 4
_MOST_OUTPUT_TOKENS = 32768


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """One served name. ``root``: the model behind it, ``parent``: the base of an adapter, as vLLM's own card says.

    ``window_tokens``: the largest window among its backends, ``None`` while unknown.
    """

    id: str
    root: str | None
    parent: str | None
    window_tokens: int | None


def models_body(records: Iterable[ModelRecord], created_s: int, output_floor_tokens: int = 0) -> bytes:
    """``GET /v1/models``. ``created_s``: a Unix time that must not change from call to call.

    ``output_floor_tokens`` is what ``fit`` keeps for the output: a prompt may have the window without it.
    The empty ``models`` keeps Codex from failing with "missing field `models`".
    """
    data = [_card(record, created_s, output_floor_tokens) for record in records]
    return encode({"object": "list", "data": data, "models": []})


def model_body(record: ModelRecord, created_s: int, output_floor_tokens: int = 0) -> bytes:
    """``GET /v1/models/{id}``."""
    return encode(_card(record, created_s, output_floor_tokens))


def model_info_body(records: Iterable[ModelRecord], output_floor_tokens: int = 0) -> bytes:
    """``GET /model/info`` as LiteLLM's proxy answers it, which Crush and OpenHands read."""
    return encode({"data": [_info(record, output_floor_tokens) for record in records]})


def _card(record: ModelRecord, created_s: int, output_floor_tokens: int) -> dict[str, Any]:
    card: dict[str, Any] = {
        "id": record.id,
        "object": "model",
        "created": created_s,
        "owned_by": "vllm",
        "root": record.root,
        "parent": record.parent,
    }
    window = record.window_tokens
    if window is None:
        return card  # unknown is not zero: a client then takes its own default
    return {
        **card,
        "max_model_len": window,
        "context_length": window,
        "context_window": window,
        **_limits(window, output_floor_tokens),
        "meta": {"n_ctx": window},
    }


def _info(record: ModelRecord, output_floor_tokens: int) -> dict[str, Any]:
    info: dict[str, Any] = {"id": record.id, "mode": "chat", "litellm_provider": "openai"}
    if record.window_tokens is not None:
        limits = _limits(record.window_tokens, output_floor_tokens)
        info |= {**limits, "max_tokens": limits["max_output_tokens"]}  # LiteLLM: the output's limit
    return {
        "model_name": record.id,
        "litellm_params": {"model": f"openai/{record.id}"},
        "model_info": info,
    }


def _limits(window: int, output_floor_tokens: int) -> dict[str, int]:
    floor = min(output_floor_tokens, window // 2)
    return {
        "max_input_tokens": window - floor,
        "max_output_tokens": min(_MOST_OUTPUT_TOKENS, max(1, window // _OUTPUT_SHARE)),
    }
