"""Each release refuses in its own words, and its envelope is its own too."""

from __future__ import annotations

import pytest

from gateway.simulator.errors import ApiError, Lengths, check_lengths, envelope, unknown_model
from gateway.simulator.options import SimulatorOptions, Version

CHAT_OVERFLOW = {
    "0.10.0": "This model's maximum context length is 1000 tokens. However, you requested 1250 tokens (1200 in the "
    "messages, 50 in the completion). Please reduce the length of the messages or completion.",
    "0.10.1": "This model's maximum context length is 1000 tokens. However, your request has 1200 input tokens. "
    "Please reduce the length of the input messages.",
    "0.14.0": "This model's maximum context length is 1000 tokens. However, your request has 1200 input tokens. "
    "Please reduce the length of the input messages. (parameter=input_tokens, value=1200)",
    "0.17.1": "You passed 951 input tokens and requested 50 output tokens. However, the model's context length is only "
    "1000 tokens, resulting in a maximum input length of 950 tokens. Please reduce the length of the input prompt. "
    "(parameter=input_tokens, value=951)",
    "0.31.0": "This model's maximum context length is 1000 tokens. However, you requested 50 output tokens and your "
    "prompt contains at least 951 input tokens, for a total of at least 1001 tokens. Please reduce the length of the "
    "input prompt or the number of requested output tokens. (parameter=input_tokens, value=951)",
    "0.32.0": "This model's maximum context length is 1000 tokens. However, your prompt contains at least 1001 input "
    "tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. "
    "(parameter=input_tokens, value=1001)",
}


def refusal(version: str, prompt: int, output: int | None, **more: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        accept(version, prompt, output, **more)
    return caught.value


def accept(version: str, prompt: int, output: int | None, **more: object) -> int:
    fields: dict[str, object] = {"api": "chat", "window_tokens": 1000, "prompt_tokens": prompt, "output_tokens": output}
    return check_lengths(Version.parse(version), Lengths(**{**fields, **more}))  # type: ignore[arg-type]


@pytest.mark.parametrize(("version", "text"), CHAT_OVERFLOW.items())
def test_a_prompt_beyond_the_window(version: str, text: str) -> None:
    error = refusal(version, 1200, 50)
    assert error.message == text
    assert error.status == 400
    assert error.kind == "BadRequestError"


@pytest.mark.parametrize("version", [*CHAT_OVERFLOW, "0.16.0", "0.18.1", "0.25.1"])
def test_prompt_plus_budget_beyond_the_window_is_an_error_until_031_and_clamped_from_032_on(version: str) -> None:
    if version == "0.32.0":
        assert accept(version, 960, 50) == 40
    else:
        assert "1000" in refusal(version, 960, 50).message
    assert accept(version, 950, 50) == 50
    assert accept(version, 950, None) == 50


def test_the_budget_alone_beyond_the_window() -> None:
    assert refusal("0.32.0", 5, 1001).message == (
        "max_tokens=1001 cannot be greater than max_model_len=1000. Please request fewer output tokens. "
        "(parameter=max_tokens, value=1001)"
    )
    assert refusal("0.17.1", 5, 1001, output_field="max_completion_tokens").message.startswith(
        "max_completion_tokens=1001cannot be greater than max_model_len=max_total_tokens=1000."
    )
    assert refusal("0.10.1", 5, 1001).message == (
        "'max_tokens' or 'max_completion_tokens' is too large: 1001. This model's maximum context length is 1000 "
        "tokens and your request has 5 input tokens (1001 > 1000 - 5)."
    )


def test_a_prompt_that_just_fills_the_window_leaves_no_token() -> None:
    assert refusal("0.32.0", 1000, None).message == (
        "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)"
    )
    assert refusal("0.10.0", 1000, None).message == (
        "This model's maximum context length is 1000 tokens. However, you requested 1000 tokens in the messages, "
        "Please reduce the length of the messages."
    )
    assert accept("0.32.0", 1000, None, api="pooling") == 0
    assert refusal("0.32.0", 1000, None, api="responses").kind == "invalid_request_error"


def test_completions_name_the_room_left_from_0102_to_015() -> None:
    assert refusal("0.10.2", 990, 16, api="completions").message.startswith(
        "This maximum context length is 984 tokens."
    )
    assert refusal("0.11.2", 990, 16, api="completions").message.startswith(
        "This model's maximum context length is 984 tokens. However, your request has 990 input tokens."
    )


def test_token_ids_are_counted_to_the_end_and_text_only_to_the_limit() -> None:
    assert "contains 1200 input tokens" in refusal("0.32.0", 1200, 50, from_text=False).message
    assert "1200 input tokens, for a total of 1250 tokens" in refusal("0.31.0", 1200, 50, from_text=False).message


def test_a_text_too_long_for_any_tokenizer_is_refused_by_its_characters() -> None:
    error = refusal("0.32.0", 5000, 50, characters=100001, longest_token_chars=100)
    assert "contains 100001 characters (more than 100000 characters, which is the upper bound" in error.message
    assert error.param == "input_text"
    assert accept("0.32.0", 900, 50, characters=100000, longest_token_chars=100) == 50


def test_the_envelope_is_flat_up_to_0100() -> None:
    error = refusal("0.10.0", 1200, 50)
    assert envelope(Version.parse("0.10.0"), error) == {
        "object": "error",
        "message": error.message,
        "type": "BadRequestError",
        "param": None,
        "code": 400,
    }
    wrapped = envelope(Version.parse("0.32.0"), refusal("0.32.0", 1200, 50))
    assert wrapped["error"]["param"] == "input_tokens"
    assert wrapped["error"]["code"] == 400


def test_an_unknown_model_is_answered_with_the_known_ones_since_032() -> None:
    assert unknown_model(Version.parse("0.32.0"), "x", ["a", "b"]).message == (
        "The model `x` does not exist. Valid aliases: a, b."
    )
    old = unknown_model(Version.parse("0.13.0"), "x", ["a"])
    assert (old.message, old.param, old.status) == ("The model `x` does not exist.", None, 404)


def test_versions_compare_by_number() -> None:
    assert Version.parse("0.10.1.1").since(0, 10, 1)
    assert not Version.parse("v0.9.2").since(0, 10)
    with pytest.raises(ValueError, match="not a vLLM version"):
        Version.parse("latest")
    with pytest.raises(ValueError, match="too old"):
        SimulatorOptions(vllm_version="0.7.3")
