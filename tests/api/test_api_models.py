"""The lists of models, as each client reads them."""

from __future__ import annotations

import json

from gateway.api.models import ModelRecord, model_body, model_info_body, models_body

BASE = ModelRecord("m", "Qwen/Qwen3-0.6B", None, 32768)
ADAPTER = ModelRecord("m-lora", "/adapters/m", "m", 32768)
UNKNOWN = ModelRecord("new", "new", None, None)


def test_the_window_stands_under_every_name_clients_look_for() -> None:
    assert json.loads(models_body([BASE], 1764480000, 1024)) == {
        "object": "list",
        "data": [
            {
                "id": "m",
                "object": "model",
                "created": 1764480000,
                "owned_by": "vllm",
                "root": "Qwen/Qwen3-0.6B",
                "parent": None,
                "max_model_len": 32768,
                "context_length": 32768,
                "context_window": 32768,
                "max_input_tokens": 31744,
                "max_output_tokens": 8192,
                "meta": {"n_ctx": 32768},
            }
        ],
        "models": [],
    }


def test_models_keep_their_order_and_their_parents() -> None:
    data = json.loads(models_body([BASE, ADAPTER], 1))["data"]
    assert [(card["id"], card["parent"]) for card in data] == [("m", None), ("m-lora", "m")]


def test_an_unknown_window_is_not_told_as_a_number() -> None:
    (card,) = json.loads(models_body([UNKNOWN], 1))["data"]
    assert set(card) == {"id", "object", "created", "owned_by", "root", "parent"}


def test_one_model_is_told_as_in_the_list() -> None:
    assert json.loads(model_body(BASE, 5, 1024)) == json.loads(models_body([BASE], 5, 1024))["data"][0]


def test_limits_stay_sensible_at_both_ends() -> None:
    tiny = json.loads(model_body(ModelRecord("t", "t", None, 512), 1, 1024))
    assert (tiny["max_input_tokens"], tiny["max_output_tokens"]) == (256, 128)
    huge = json.loads(model_body(ModelRecord("h", "h", None, 1_048_576), 1, 1024))
    assert (huge["max_input_tokens"], huge["max_output_tokens"]) == (1_047_552, 32768)


def test_model_info_in_the_form_of_litellm() -> None:
    known, unknown = json.loads(model_info_body([BASE, UNKNOWN], 1024))["data"]
    assert known == {
        "model_name": "m",
        "litellm_params": {"model": "openai/m"},
        "model_info": {
            "id": "m",
            "mode": "chat",
            "litellm_provider": "openai",
            "max_input_tokens": 31744,
            "max_output_tokens": 8192,
            "max_tokens": 8192,
        },
    }
    assert "max_input_tokens" not in unknown["model_info"]
