"""``POST /v1/completions``: a body becomes an ``Ask``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.api.body import model_name, parse_object, positive, truthy
from gateway.api.budget import Budget, read_budget, read_usage_wish
from gateway.api.chat import truncation
from gateway.types import Ask, Dialect, TextPrompts, TokenPrompts

PATH = "/v1/completions"


def parse(body: bytes, content_type: str | None, path: str = PATH) -> Ask:
    """Read a completions request; ``prompt`` is one text, many, one list of token ids, or many. Raises ``BadRequest``.

    The prompt is ``None`` when it cannot be counted here: prompt embeddings, a ``suffix`` (only some renderers take
    one, each in its own way), or a shape that vLLM will refuse.
    """
    document = parse_object(body, content_type)
    stream = truthy(document.get("stream"))
    budget = _budget(document)
    usage = read_usage_wish(document, stream)
    special = truthy(document.get("add_special_tokens"), otherwise=True)
    countable = document.get("prompt_embeds") is None and not document.get("suffix")
    return Ask(
        dialect=Dialect.COMPLETIONS,
        path=path,
        model=model_name(document),
        prompt=prompts_of(document.get("prompt"), special) if countable else None,
        body=body,
        document=document,
        output_tokens=budget.tokens,
        output_field=budget.field,
        n=positive(document.get("n")),
        stream=stream,
        include_usage=usage.at_end,
        truncate_prompt_tokens=truncation(document),
        min_output_tokens=positive(document.get("min_tokens"), 0),
        drop_fields=budget.drop_fields,
        continuous_usage=usage.in_every_chunk,
    )


def _budget(document: Mapping[str, Any]) -> Budget:
    budget = read_budget(document, ("max_tokens",))
    if truthy(document.get("echo")) and budget.tokens is None and document.get("max_tokens") == 0:
        # Echo with a budget of 0 scores the prompt; vLLM takes it and generates one token inside.
        return Budget(1, budget.field, ())
    return budget


def prompts_of(prompt: Any, special: bool) -> TextPrompts | TokenPrompts | None:
    """One text, many, one list of token ids, or many; ``None`` for any other shape. ``special``: BOS and its like."""
    if isinstance(prompt, str):
        return TextPrompts((prompt,), special)
    if not isinstance(prompt, list) or not prompt:
        return None
    if all(isinstance(item, str) for item in prompt):
        return TextPrompts(tuple(prompt), special)
    if _are_ids(prompt):
        return TokenPrompts((len(prompt),))
    if all(isinstance(item, list) and _are_ids(item) for item in prompt):
        return TokenPrompts(tuple(len(item) for item in prompt))
    return None


def _are_ids(items: list[Any]) -> bool:
    return set(map(type, items)) <= {int}
