"""Our count of the requests of the conformance table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache

from conformance_requests import Body, wire
from families.catalogue import FAMILIES, MODELS, Family
from families.models import model_folder
from families.templates import template_file

from gateway.api import chat
from gateway.tokens.clock import BackendClock
from gateway.tokens.errors import CannotCount
from gateway.tokens.local import LocalCounter, TemplateOptions, load
from gateway.types import TokenPrompts


@dataclass(frozen=True, slots=True)
class DayClock(BackendClock):
    """A clock that stands still on ``start_date``."""

    def now(self) -> datetime:
        assert self.start_date is not None
        return datetime.fromisoformat(self.start_date)


class Recount:
    """Counts requests for one family as the gateway does. Raises ``CannotFetch`` where the tokenizer is not to be had.

    ``date`` is the day (ISO) on which vLLM was asked, for templates that print it.
    """

    def __init__(self, family: Family, date: str) -> None:
        self._template = None
        if family.template is not None:
            self._template = template_file(family.template).read_text(encoding="utf-8")
        self._local = loaded(family.model, family.architecture, date)

    def count(self, body: Body) -> int | str:
        """Tokens, or why there are none."""
        prompt = chat.parse(wire(body, "m"), "application/json").prompt
        assert prompt is not None and not isinstance(prompt, TokenPrompts)
        if self._template is not None:
            prompt = replace(prompt, chat_template=self._template)
        try:
            (tokens,) = self._local.count(prompt, {})
        except CannotCount as error:
            return error.reason
        return tokens


@cache
def loaded(model: str, architecture: str | None, date: str) -> LocalCounter:
    """The counter of a tiny model. Templates come with the requests, as they went to the server."""
    folder = model_folder(MODELS[model], architecture)
    # Without any template of its own a model would count as one that cannot chat.
    some = next((family.template for family in FAMILIES if family.model == model), None)
    options = TemplateOptions(
        chat_template=template_file(some) if some is not None else None,
        trust_request=True,
        clock=DayClock(start_date=date),
    )
    return load(str(folder), options, hub=False, cache_bytes=1 << 24)
