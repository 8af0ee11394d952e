"""Error texts, types and envelopes of vLLM's API server, by release.

The wording is what clients and gateways match on, so every odd space and doubled word here is vLLM's own
(``renderers/params.py``, ``entrypoints/openai/serving_engine.py`` and their kin, 0.8 to 0.32).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gateway.simulator.options import Version

Api = Literal["chat", "completions", "responses", "messages", "pooling"]


class ApiError(Exception):
    """An error with its HTTP status, vLLM's ``type`` string and the parameter at fault."""

    def __init__(self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None):
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.param = param


def envelope(version: Version, error: ApiError) -> dict[str, Any]:
    """The OpenAI-side body: flat up to 0.10.0, wrapped in ``error`` from 0.10.1 on."""
    fields = {"message": error.message, "type": error.kind, "param": error.param, "code": error.status}
    return {"error": fields} if version.since(0, 10, 1) else {"object": "error", **fields}


def anthropic_envelope(error: ApiError) -> dict[str, Any]:
    """The body of ``/v1/messages``; the type string stays the OpenAI route's."""
    return {"type": "error", "error": {"type": error.kind, "message": error.message}}


def validation_error(version: Version, text: str, parameter: str, value: object) -> ApiError:
    """A ``VLLMValidationError``: since 0.14 the text ends with the parameter and its value."""
    if not version.since(0, 14):
        return ApiError(text)
    return ApiError(f"{text} (parameter={parameter}, value={value})", param=parameter)


def unknown_model(version: Version, model: str, known: Sequence[str]) -> ApiError:
    """404 for a name that is not served; since 0.32 with the names that are."""
    text = f"The model `{model}` does not exist."
    if version.since(0, 32):
        text += f" Valid aliases: {', '.join(known)}."
    return ApiError(text, status=404, kind="NotFoundError", param="model" if version.since(0, 14) else None)


def schema_error(version: Version, kind: str, loc: Sequence[str | int], message: str, given: object) -> ApiError:
    """A body FastAPI refuses: 400 with pydantic's error in the text."""
    path = ".".join(str(part) for part in loc)
    shown: object = given if not isinstance(given, list | dict) else f"<{type(given).__name__} of {len(given)} items>"
    if version.since(0, 32):
        detail = {"type": kind, "loc": path, "msg": message, "input": shown}
        return ApiError(f"1 validation error:\n  {detail}", kind="Bad Request", param=path)
    detail = {"type": kind, "loc": tuple(loc), "msg": message, "input": shown}
    if version.since(0, 9):
        return ApiError(f"1 validation error:\n  {detail} {[detail]}", kind="Bad Request")
    return ApiError(str([detail]))


def check_priority(version: Version, document: Mapping[str, Any]) -> None:
    """``priority`` changes nothing here, but must be what pydantic takes for an integer. Raises ``ApiError``."""
    value = document.get("priority", 0)
    kind, more = "int_type", ""
    if isinstance(value, int):
        return
    if isinstance(value, str):
        if re.fullmatch(r"\s*[-+]?\d+\s*", value):
            return
        kind, more = "int_parsing", ", unable to parse string as an integer"
    elif isinstance(value, float):
        if value.is_integer():
            return
        kind, more = "int_from_float", ", got a number with a fractional part"
    raise schema_error(version, kind, ("body", "priority"), f"Input should be a valid integer{more}", value)


@dataclass(frozen=True, slots=True)
class Lengths:
    """What the length checks of one prompt look at.

    ``output_tokens``: the budget asked for, ``None`` if absent. ``output_field``: the body field that carried it.
    ``from_text``: the prompt was tokenised here, so since 0.16 counting stops one token beyond the limit.
    """

    api: Api
    window_tokens: int
    prompt_tokens: int
    output_tokens: int | None
    output_field: str = "max_tokens"
    from_text: bool = True
    characters: int | None = None
    longest_token_chars: int | None = None


def check_lengths(version: Version, lengths: Lengths) -> int:
    """Refuse what this release refuses; otherwise the effective output budget in tokens. Raises ``ApiError``.

    For pooling requests the result is 0.
    """
    if version.since(0, 32):
        _check_032(version, lengths)
    elif version.since(0, 16):
        _check_016(version, lengths)
    elif version.since(0, 10, 1):
        _check_0101(version, lengths)
    else:
        _check_old(lengths)
    if lengths.api == "pooling":
        return 0
    left = lengths.window_tokens - lengths.prompt_tokens
    budget = left if lengths.output_tokens is None else min(left, lengths.output_tokens)
    if budget < 1:
        if lengths.api == "responses" and version.since(0, 11):
            text = (
                f"The engine prompt length {lengths.prompt_tokens} exceeds the max_model_len {lengths.window_tokens}. "
                "Please reduce prompt."
            )
            raise ApiError(text, kind="invalid_request_error", param="input")
        raise validation_error(version, f"max_tokens must be at least 1, got {budget}.", "max_tokens", budget)
    return budget


def _check_032(version: Version, lengths: Lengths) -> None:
    window, asked = lengths.window_tokens, lengths.output_tokens
    if asked is not None and asked > window:
        name = lengths.output_field
        text = f"{name}={asked} cannot be greater than max_model_len={window}. Please request fewer output tokens."
        raise validation_error(version, text, name, asked)
    start = f"This model's maximum context length is {window} tokens. However, your prompt contains"
    end = "Please reduce the length of the input prompt."
    most = _most_characters(lengths, window)
    if most is not None and lengths.characters is not None:
        text = (
            f"{start} {lengths.characters} characters (more than {most} characters, which is the upper bound for "
            f"{window} input tokens). {end}"
        )
        raise validation_error(version, text, "input_text", lengths.characters)
    if lengths.prompt_tokens > window:
        seen = window + 1 if lengths.from_text else lengths.prompt_tokens
        at_least = "at least " if seen == window + 1 else ""
        text = f"{start} {at_least}{seen} input tokens, which exceeds this limit even without any output tokens. {end}"
        raise validation_error(version, text, "input_tokens", seen)


def _check_016(version: Version, lengths: Lengths) -> None:
    """0.16 to 0.31: the prompt must leave room for the whole budget asked for."""
    window, asked = lengths.window_tokens, lengths.output_tokens or 0
    limit = window - asked
    if limit < 0:
        name = lengths.output_field
        total = "max_model_len" if version.since(0, 20) else "max_model_len=max_total_tokens"
        space = " " if version.since(0, 20) else ""
        text = f"{name}={asked}{space}cannot be greater than {total}={window}. Please request fewer output tokens."
        raise validation_error(version, text, name, asked)
    most = _most_characters(lengths, limit)
    if most is None and lengths.prompt_tokens <= limit:
        return
    seen = limit + 1 if lengths.from_text else lengths.prompt_tokens
    if version.since(0, 18):
        start = f"This model's maximum context length is {window} tokens. However, you requested {asked} output tokens"
        end = "Please reduce the length of the input prompt or the number of requested output tokens."
        if most is not None and lengths.characters is not None:
            text = (
                f"{start} and your prompt contains {lengths.characters} characters (more than {most} characters, "
                f"which is the upper bound for {limit} input tokens). {end}"
            )
            raise validation_error(version, text, "input_text", lengths.characters)
        least = "at least " if seen == limit + 1 else ""
        text = (
            f"{start} and your prompt contains {least}{seen} input tokens, for a total of {least}{seen + asked} "
            f"tokens. {end}"
        )
        raise validation_error(version, text, "input_tokens", seen)
    unit, passed = ("input characters", lengths.characters) if most is not None else ("input tokens", seen)
    text = (
        f"You passed {passed} {unit} and requested {asked} output tokens. However, the model's context length is only "
        f"{window} tokens, resulting in a maximum input length of {limit} tokens"
        + (f" (at most {most} characters)" if most is not None else "")
        + ". Please reduce the length of the input prompt."
    )
    raise validation_error(version, text, "input_text" if most is not None else "input_tokens", passed)


def _check_0101(version: Version, lengths: Lengths) -> None:
    """0.10.1 to 0.15: exact counts; completions count the budget against the window from 0.10.2 on."""
    window, prompt, asked = lengths.window_tokens, lengths.prompt_tokens, lengths.output_tokens
    if lengths.api == "pooling":
        return _check_pooling(lengths)
    if lengths.api == "completions" and version.since(0, 10, 2):
        return _check_completions(version, lengths)
    if prompt >= window:
        text = (
            f"This model's maximum context length is {window} tokens. However, your request has {prompt} input tokens. "
            "Please reduce the length of the input messages."
        )
        raise validation_error(version, text, "input_tokens", prompt)
    if asked is not None and prompt + asked > window:
        text = (
            f"'max_tokens' or 'max_completion_tokens' is too large: {asked}. This model's maximum context length is "
            f"{window} tokens and your request has {prompt} input tokens ({asked} > {window} - {prompt})."
        )
        raise validation_error(version, text, "max_tokens", asked)
    return None


def _check_completions(version: Version, lengths: Lengths) -> None:
    window, asked = lengths.window_tokens, lengths.output_tokens or 0
    if asked > window and version.since(0, 14):
        text = f"'max_tokens' ({asked}) cannot be greater than the model's maximum context length ({window})."
        raise validation_error(version, text, "max_tokens", asked)
    limit = window - asked
    if lengths.prompt_tokens > limit:
        start = "This model's" if version.since(0, 10, 3) else "This"
        text = (
            f"{start} maximum context length is {limit} tokens. However, your request has {lengths.prompt_tokens} "
            "input tokens. Please reduce the length of the input messages."
        )
        raise validation_error(version, text, "input_tokens", lengths.prompt_tokens)


def _check_old(lengths: Lengths) -> None:
    """Up to 0.10.0: prompt plus budget in one number, and the prompt's exact length in the text."""
    window, prompt, asked = lengths.window_tokens, lengths.prompt_tokens, lengths.output_tokens
    if lengths.api == "pooling":
        return _check_pooling(lengths)
    start = f"This model's maximum context length is {window} tokens. However, you requested"
    if asked is None and prompt >= window:
        raise ApiError(f"{start} {prompt} tokens in the messages, Please reduce the length of the messages.")
    if asked is not None and prompt + asked > window:
        raise ApiError(
            f"{start} {prompt + asked} tokens ({prompt} in the messages, {asked} in the completion). "
            "Please reduce the length of the messages or completion."
        )
    return None


def _check_pooling(lengths: Lengths) -> None:
    if lengths.prompt_tokens > lengths.window_tokens:
        raise ApiError(
            f"This model's maximum context length is {lengths.window_tokens} tokens. However, you requested "
            f"{lengths.prompt_tokens} tokens in the input for embedding generation. "
            "Please reduce the length of the input."
        )


def _most_characters(lengths: Lengths, limit_tokens: int) -> int | None:
    """The character bound if the text is beyond it, which is tested before tokenising; else ``None``."""
    if lengths.characters is None or lengths.longest_token_chars is None:
        return None
    most = limit_tokens * lengths.longest_token_chars
    return most if lengths.characters > most else None
