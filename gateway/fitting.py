"""What a request becomes before it is placed: counted, and made to fit, or refused, as the policies say."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from gateway.api.history import opening_of
from gateway.api.rewrite import with_model
from gateway.config import Settings
from gateway.exceptions import ContextOverflow, UnknownModel
from gateway.fleet.fleet import Fleet
from gateway.fleet.models import Model
from gateway.guard.conversation import Conversations, Identity, identity
from gateway.guard.cut import Untrimmable
from gateway.guard.fit import fit
from gateway.guard.policy import Action, Choice, Policy, action, choice, larger_model
from gateway.observe.metrics import Metrics
from gateway.tokens.service import Counter, ServedModel
from gateway.trimming import Shorter, Trimmer
from gateway.types import Ask, Count, CountKind, Dialect, Fits, Offer, Overflow, Verdict

# Takes a count, and the name of the model by whose tokenizer it is.
Counted = Callable[[Count, str], None]

# A backend refuses a trimmed prompt as too long only if the count was an estimate; once more is enough to know.
MOST_CORRECTIONS = 2


@dataclass(frozen=True, slots=True)
class Signs:
    """What a request shows of its sender beside its body. Empty where it shows nothing.

    ``overflow``: the header ``x-kvgate-overflow``. ``session``: what the client calls its conversation. ``key``: the
    fingerprint of its API key.
    """

    overflow: str | None = None
    session: str = ""
    user_agent: str = ""
    key: str = ""


@dataclass(frozen=True, slots=True)
class Fitted:
    """The request as it goes on: ``ask`` is what will be sent, ``count`` its prompt, ``offers`` who can take it.

    ``counted_as``: the model by whose name the count is audited, empty if nothing was counted. ``original``: the ask
    as the client sent it and its count. ``trimmed``: what was removed.
    """

    ask: Ask
    model: Model
    count: Count
    offers: tuple[Offer, ...]
    counted_as: str
    original: tuple[Ask, Count]
    trimmed: Shorter | None = None
    corrections: int = 0

    @property
    def trimmed_tokens(self) -> int:
        """Prompt tokens that were removed."""
        return max(0, self.original[1].total_tokens - self.count.total_tokens) if self.trimmed is not None else 0


class Fitter:
    """Counts requests and makes them fit, as the policies say."""

    def __init__(self, settings: Settings, fleet: Fleet, counter: Counter, trimmer: Trimmer, metrics: Metrics) -> None:
        self._settings = settings
        self._fleet = fleet
        self._counter = counter
        self._trimmer = trimmer
        self._metrics = metrics
        self._conversations = Conversations(settings.overflow.remember_most, settings.overflow.remember_s)

    async def fit(self, ask: Ask, model: Model, signs: Signs, counted: Counted) -> Fitted:
        """The request as it can be sent. Raises ``ContextOverflow`` (and ``BadRequest`` for a wrong policy header).

        ``counted`` is told the count as soon as it is known.
        """
        windows = self._fleet.windows(model.id)
        if not ask.counted:
            # Not rendered here: the size of the body stands in for its need of KV blocks, and the backend judges it.
            guess = Count(len(ask.body) // 4, len(ask.body) // 4, CountKind.ESTIMATE, "bytes")
            offers = tuple(Offer(name, window, None, False) for name, window in sorted(windows.items()))
            return Fitted(ask, model, guess, offers, "", (ask, guess))
        chosen = choice_of(self._settings, ask, model.id, signs)
        served = self.served(model)
        count = await self._counter.count(ask, served)
        counted(count, served.name)
        self._metrics.counts.labels(model.id, count.kind, count.source).inc()
        # Who consents to trimming is trimmed with care; vLLM would cut tokens off the prompt's start, template and all.
        whole = replace(ask, truncate_prompt_tokens=None) if _is_cut_by_backend(ask, chosen) else ask
        verdict = verdict_of(self._settings, whole, count, windows, model.id)
        if isinstance(verdict, Fits):
            now_s = time.monotonic()
            if chosen.policy in (Policy.AUTO, Policy.LARGER) and self._conversations.awaits(now_s):
                who = self._who(ask, model, signs)
                if who is not None:
                    self._conversations.fitted(who, now_s)
            return Fitted(ask, model, count, verdict.offers, served.name, (ask, count))
        return await self._overflowed(Fitted(ask, model, count, (), served.name, (ask, count)), verdict, chosen, signs)

    async def contradicted(self, fitted: Fitted, said: Overflow, signs: Signs) -> Fitted | None:
        """A backend says that ``fitted`` overflows: what an estimate could not know. ``None``: its answer stands.
        Raises ``ContextOverflow`` like ``fit``, with our count where the backend did not count to the end."""
        ask, model = fitted.ask, fitted.model
        if fitted.corrections >= MOST_CORRECTIONS or said.prompt_tokens <= 0:
            return None
        chosen = choice_of(self._settings, fitted.original[0], model.id, signs)
        # What it said is exact and about the whole prompt, unless it stopped counting at its window ("at least 4097").
        least = said.prompt_tokens <= said.window_tokens + 1
        if chosen.policy is Policy.PASS:
            if least and fitted.count.kind is CountKind.EXACT and fitted.count.tokens > said.prompt_tokens:
                asked = ask.output_tokens or said.output_tokens
                raise ContextOverflow(replace(said, prompt_tokens=fitted.count.tokens, output_tokens=asked))
            return None
        tokens = max(said.prompt_tokens, fitted.count.total_tokens) if least else said.prompt_tokens
        count = replace(fitted.count, tokens=tokens, total_tokens=tokens, kind=CountKind.EXACT)
        verdict = verdict_of(self._settings, ask, count, {"": said.window_tokens}, model.id)
        overflow = said if isinstance(verdict, Fits) else verdict
        known = replace(fitted, count=count, original=fitted.original if fitted.trimmed else (ask, count))
        again = await self._overflowed(known, overflow, chosen, signs)
        return replace(again, corrections=fitted.corrections + 1)

    def served(self, model: Model) -> ServedModel:
        """What counting needs to know of ``model``. A LoRA adapter is counted as its base model: it has the base's
        tokenizer and template, and its own root is the adapter's folder."""
        base = model
        while base.parent is not None:
            try:
                base = self._fleet.resolve(base.parent)
            except UnknownModel:
                break
        backends = [self._fleet.backend(name) for name in model.backends]
        return ServedModel(
            name=base.id,
            root=base.root or base.id,
            backends=tuple(backend.url for backend in backends),
            api_keys={item.url: item.api_key.get_secret_value() for item in backends if item.api_key},
            vllm_version=next((backend.version for backend in backends if backend.version), None),
            adapter=model.id if model.parent is not None else "",
        )

    def close(self) -> None:
        """Let the threads end."""
        self._trimmer.close()

    async def _overflowed(self, fitted: Fitted, overflow: Overflow, chosen: Choice, signs: Signs) -> Fitted:
        """What the policy makes of an overflow. Raises ``ContextOverflow``."""
        if chosen.policy is Policy.LARGER:
            larger = await self._larger(fitted)
            if larger is not None:
                self._metrics.overflows.labels(fitted.model.id, "larger").inc()
                return larger
        done = self._action(fitted, chosen, signs)
        self._metrics.overflows.labels(fitted.model.id, done).inc()
        match done:
            case Action.REFUSE:
                raise ContextOverflow(overflow)
            case Action.PASS:
                return replace(fitted, offers=self._blind_offers(fitted))
        return await self._trimmed(fitted, overflow)

    def _action(self, fitted: Fitted, chosen: Choice, signs: Signs) -> Action:
        who = self._who(fitted.original[0], fitted.model, signs)
        settings = self._settings.overflow
        automatic = chosen.policy in (Policy.AUTO, Policy.LARGER)
        refused_before = False
        if automatic and who is not None and fitted.trimmed is None:
            refused_before = self._conversations.overflowed(who, time.monotonic())
        return action(
            chosen.policy,
            refused_before=refused_before or fitted.trimmed is not None,
            user_agent=signs.user_agent,
            trim_clients=settings.trim_clients,
        )

    async def _trimmed(self, fitted: Fitted, overflow: Overflow) -> Fitted:
        served = self.served(fitted.model)
        shorter = await self._trimmer.trim(fitted.ask, served, fitted.count, overflow)
        windows = self._fleet.windows(fitted.model.id)
        if isinstance(shorter, Untrimmable):
            verdict = verdict_of(self._settings, fitted.ask, fitted.count, windows, fitted.model.id)
            if fitted.ask.truncate_prompt_tokens is not None and isinstance(verdict, Fits):
                return replace(fitted, offers=verdict.offers)  # the caller would rather have it cut anyhow
            raise ContextOverflow(overflow, shorter.reason)
        verdict = verdict_of(self._settings, shorter.ask, shorter.count, windows, fitted.model.id)
        if isinstance(verdict, Overflow):
            raise ContextOverflow(verdict)
        trimmed = replace(fitted, ask=shorter.ask, count=shorter.count, offers=verdict.offers, trimmed=shorter)
        self._record(trimmed, shorter)
        return trimmed

    def _record(self, fitted: Fitted, shorter: Shorter) -> None:
        report, name = shorter.report, fitted.model.id
        self._metrics.trimmed_tokens.labels(name).inc(fitted.trimmed_tokens)
        done = {
            "messages": report.messages_dropped,
            "texts": report.texts_shortened,
            "reasoning": report.reasoning_dropped,
            "images": report.images_dropped,
            "summaries": int(shorter.summarised),
        }
        for what, number in done.items():
            if number:
                self._metrics.trims.labels(name, what).inc(number)

    async def _larger(self, fitted: Fitted) -> Fitted | None:
        """The request for the model that the settings name for what is too large for its own, if that holds it."""
        override = self._settings.models.get(fitted.model.id)
        windows = {model.id: model.window_tokens for model in self._fleet.models()}
        name = larger_model(fitted.model.id, override.larger_model if override else None, windows)
        if name is None:
            return None
        model = self._fleet.resolve(name)
        ask = with_model(fitted.ask, name)
        served = self.served(model)
        count = await self._counter.count(ask, served)
        verdict = verdict_of(self._settings, ask, count, self._fleet.windows(name), name)
        if isinstance(verdict, Overflow):
            return None
        return Fitted(ask, model, count, verdict.offers, served.name, (ask, count))

    def _blind_offers(self, fitted: Fitted) -> tuple[Offer, ...]:
        """The largest windows, which will judge for themselves."""
        doubtful = replace(fitted.count, kind=CountKind.ESTIMATE)
        windows = self._fleet.windows(fitted.model.id)
        verdict = verdict_of(self._settings, fitted.ask, doubtful, windows, fitted.model.id)
        assert isinstance(verdict, Fits), "an estimate refuses nothing"
        return verdict.offers

    @staticmethod
    def _who(ask: Ask, model: Model, signs: Signs) -> Identity | None:
        """Whose conversation it is; ``None`` for a request that is none."""
        opening = opening_of(ask)
        if opening is None:
            return None
        system, first_user = opening
        return identity(key=signs.key, model=model.id, session=signs.session, system=system, first_user=first_user)


def verdict_of(settings: Settings, ask: Ask, count: Count, windows: Mapping[str, int], model: str) -> Verdict:
    """What ``windows`` make of ``ask``, by the settings for ``model``."""
    override = settings.models.get(model)
    return fit(ask, count, windows, settings.fitting, override.output_floor_tokens if override else None)


def choice_of(settings: Settings, ask: Ask, model: str, signs: Signs) -> Choice:
    """The policy that ``ask`` has, and from whom. Raises ``BadRequest`` for a header that names none."""
    override = settings.models.get(model)
    return choice(
        header=signs.overflow,
        document=ask.document,
        key=settings.overflow.keys.get(signs.key),
        route=settings.overflow.routes.get(ask.path),
        model=override.overflow if override else None,
        default=settings.overflow.policy,
    )


def _is_cut_by_backend(ask: Ask, chosen: Choice) -> bool:
    """Whether ``truncation: "auto"`` of a Responses request is all the consent there is."""
    return ask.dialect is Dialect.RESPONSES and chosen.policy is Policy.TRIM and ask.truncate_prompt_tokens is not None


def trim_headers(fitted: Fitted) -> list[tuple[str, str]]:
    """The headers that tell a client what was removed. Documented in docs/headers.md."""
    if fitted.trimmed is None:
        return []
    report = fitted.trimmed.report
    told: Mapping[str, int] = {
        "x-kvgate-untrimmed-prompt-tokens": fitted.original[1].total_tokens,
        "x-kvgate-trimmed-tokens": fitted.trimmed_tokens,
        "x-kvgate-trimmed-messages": report.messages_dropped,
        "x-kvgate-trimmed-texts": report.texts_shortened,
    }
    return [(name, str(number)) for name, number in told.items()]
