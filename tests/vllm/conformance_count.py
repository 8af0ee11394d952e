"""Our count of the requests of the conformance table."""

from __future__ import annotations

from conformance_requests import Body, wire
from families.catalogue import MODELS, Family
from families.models import model_folder
from families.templates import template_file

from gateway.api import chat
from gateway.tokens.errors import CannotCount
from gateway.tokens.local import LocalCounter, TemplateOptions, load
from gateway.types import TokenPrompts


class Recount:
    """Counts requests for one family as the gateway does. Raises ``CannotFetch`` where the tokenizer is not to be had.

    ``date`` is the day (ISO) on which vLLM was asked, for templates that print it.
    """

    def __init__(self, family: Family, date: str) -> None:
        template = template_file(family.template) if family.template is not None else None
        folder = model_folder(MODELS[family.model])
        self.date = date
        self.local: LocalCounter = load(
            str(folder), TemplateOptions(chat_template=template), hub=False, cache_bytes=1 << 24
        )

    def count(self, body: Body) -> int | str:
        """Tokens, or why there are none."""
        prompt = chat.parse(wire(body, "m"), "application/json").prompt
        assert prompt is not None and not isinstance(prompt, TokenPrompts)
        try:
            (tokens,) = self.local.count(prompt, {})
        except CannotCount as error:
            return error.reason
        return tokens
