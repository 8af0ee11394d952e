"""Trimming a request: measure its messages, decide what goes, write the new body, and count what came out."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from gateway.api import chat, messages, responses
from gateway.api.history import MOST_PARTS, by_bytes, dropped_text, history_of, too_many_parts, trimmed_body
from gateway.config import OverflowSettings
from gateway.guard.cut import Trimmed, Untrimmable, more_slack, trim, with_notice
from gateway.guard.draft import rules_of
from gateway.history import Edit, History, Measure
from gateway.summary import Summariser
from gateway.tokens.errors import CannotCount
from gateway.tokens.service import Counter, ServedModel
from gateway.types import Ask, ChatPrompt, Count, CountKind, Dialect, Overflow

T = TypeVar("T")

_PARSERS = {Dialect.CHAT: chat.parse, Dialect.RESPONSES: responses.parse, Dialect.MESSAGES: messages.parse}
# Sums of messages are a few tokens off; two tries have been enough, whatever the template.
_TRIES = 5
_FAR_OFF = 1.1
# To render each message by itself takes about a millisecond. Of more messages the texts are measured.
MOST_SHARES = 4_000


@dataclass(frozen=True, slots=True)
class Shorter:
    """The request as it goes on: ``ask`` has the new body. ``summarised``: a summary stands for what was dropped."""

    ask: Ask
    count: Count
    report: Trimmed
    summarised: bool


class Trimmer:
    """Makes requests fit."""

    def __init__(self, settings: OverflowSettings, counter: Counter, summariser: Summariser | None = None) -> None:
        self._rules = rules_of(settings)
        self._counter = counter
        self._summariser = summariser
        # Measuring texts takes the tokenizer some milliseconds; the loop goes on meanwhile.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trim")

    async def trim(self, ask: Ask, model: ServedModel, count: Count, overflow: Overflow) -> Shorter | Untrimmable:
        """Remove what ``overflow`` says is too much. ``count``: of ``ask`` as it is. Never raises for what was sent.

        Tried again with some slack while the new count is over the limit, since a message's tokens depend a little on
        its neighbours.
        """
        limit_tokens = overflow.limit_tokens
        if too_many_parts(ask):
            more = f"It has more than {MOST_PARTS} messages and parts of messages, which are too many to trim."
            return Untrimmable(count.tokens, more)
        found = await self.history(ask, model, count)
        if found is None:
            return Untrimmable(count.tokens, "Trimming is for conversations; this request holds none.")
        slack_tokens, total_tokens, tokens = 0, count.tokens, count.tokens
        for _ in range(_TRIES):
            history, measure = found
            plan = await self._in_thread(trim, history, limit_tokens, self._rules, measure, slack_tokens)
            if isinstance(plan, Untrimmable):
                return plan
            edits, summarised = await self._with_summary(ask, history, plan)
            shorter = _with_body(ask, await self._in_thread(trimmed_body, ask, history, edits))
            counted = await self._counter.count(shorter, model)
            tokens = counted.tokens
            if tokens <= limit_tokens or counted.kind is not CountKind.EXACT:
                return Shorter(shorter, counted, plan, summarised)
            if tokens > _FAR_OFF * plan.tokens_after:
                # The sums were estimates: there was no tokenizer yet, or a backend said no more than "at least".
                total_tokens = math.ceil(total_tokens * tokens / max(1, plan.tokens_after))
                found = await self.history(ask, model, replace(count, tokens=total_tokens)) or found
            else:
                slack_tokens = more_slack(slack_tokens, tokens - limit_tokens, limit_tokens)
        return Untrimmable(tokens, "Trimming did not bring it below the limit.")

    async def history(self, ask: Ask, model: ServedModel, count: Count) -> tuple[History, Measure] | None:
        """The conversation of ``ask`` and the measure to trim it by; ``None`` if it holds none."""
        shares = await self._counter.message_tokens(ask, model) if _has_shares(ask) else None
        local = self._counter.local(model)
        measure = by_bytes if local is None else _safe(local.measure)
        return await self._in_thread(history_of, ask, measure, count.tokens, shares)

    def close(self) -> None:
        """Let the thread end."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def _with_summary(self, ask: Ask, history: History, plan: Trimmed) -> tuple[Sequence[Edit], bool]:
        """The edits of ``plan``, with a summary in the place of the note if one can be had."""
        if self._summariser is None or not plan.dropped:
            return plan.edits, False
        span = dropped_text(ask.document, ask.dialect, history, plan.dropped)
        text = await self._summariser.summary(span, plan.messages_dropped)
        return (plan.edits, False) if text is None else (with_notice(plan.edits, text), True)


def _has_shares(ask: Ask) -> bool:
    return isinstance(ask.prompt, ChatPrompt) and len(ask.prompt.messages) <= MOST_SHARES


def _with_body(ask: Ask, body: bytes) -> Ask:
    """``ask`` with another body; all that was decided about it before stays."""
    read = _PARSERS[ask.dialect](body, "application/json", ask.path)
    return replace(ask, body=body, document=read.document, prompt=read.prompt, has_media=read.has_media)


def _safe(measure: Measure) -> Measure:
    """A measure that never fails: what is too long for the tokenizer is measured by its bytes."""

    def measured(text: str) -> int:
        try:
            return measure(text)
        except CannotCount:
            return by_bytes(text)

    return measured
