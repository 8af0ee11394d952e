"""What the gateway would do with one request, worked out with the very rooms that serve requests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.api.parsers import parser_of
from gateway.api.paths import dialect_of, normalise
from gateway.api.rewrite import upstream_body
from gateway.config import BackendSettings, Settings
from gateway.exceptions import BackendFailed
from gateway.fitting import Signs, choice_of, verdict_of
from gateway.fleet.discovery import ModelCard, ProbeFailed, cards_at
from gateway.guard.cut import Trimmed, Untrimmable
from gateway.guard.policy import Choice, Policy
from gateway.history import Drop, DropMedia, DropReasoning, History, Notice, Shorten
from gateway.observe.metrics import Metrics
from gateway.repairing import Repairer
from gateway.tokens.service import Counter, ServedModel
from gateway.trimming import Shorter, Trimmer
from gateway.types import Ask, Fits, Overflow

TIMEOUT_S = 30.0


class CannotExplain(ValueError):
    """What was asked for is not there; the message says what."""


@dataclass(frozen=True, slots=True)
class MessageShare:
    """Tokens of one message by itself."""

    number: int
    role: str
    tokens: int


@dataclass(frozen=True, slots=True)
class WindowView:
    """A backend and what its window makes of the request."""

    backend: str
    window_tokens: int
    verdict: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """``verdict`` and ``edits`` are sentences. ``body`` is what would be sent, empty if nothing would."""

    path: str
    model: str
    repairs: tuple[str, ...]
    prompt_tokens: int
    count_kind: str
    count_source: str
    messages: tuple[MessageShare, ...]
    rest_tokens: int
    windows: tuple[WindowView, ...]
    policy: str
    policy_source: str
    verdict: tuple[str, ...]
    edits: tuple[str, ...]
    tokens_after: int | None
    body: bytes


async def explain(
    body: bytes,
    path: str,
    settings: Settings,
    *,
    backends: tuple[str, ...] = (),
    tokenizer: str | None = None,
    window_tokens: int | None = None,
    model: str | None = None,
) -> Explanation:
    """Explain the request ``body`` to ``path``: with the models and windows of ``backends``, or offline with
    ``tokenizer`` and ``window_tokens``. Raises ``BadRequest``, ``BackendFailed``, ``CannotExplain``.
    """
    import httpx2

    path = normalise(path)
    body = _with_model(body, model)
    async with httpx2.AsyncClient(trust_env=False, timeout=TIMEOUT_S) as client:

        async def post(url: str, body: Any, headers: Mapping[str, str], timeout_s: float) -> tuple[int, dict[str, Any]]:
            response = await client.post(url, json=body, headers=dict(headers), timeout=timeout_s)
            return response.status_code, response.json()

        wanted = parser_of("POST", path)(body, "application/json", path).model if model is None else model
        if backends:
            served, windows = await _served(backends, wanted, must=model is not None)
        else:
            served = ServedModel(wanted or "model", tokenizer or "")
            windows = {"(offline)": window_tokens or 0}
        body = _with_model(body, served.name)
        counter = Counter(settings.counting, settings.models, post)
        trimmer = Trimmer(settings.overflow, counter)
        try:
            await counter.warm(served)
            if tokenizer is not None and counter.local(served) is None:
                view = counter.describe(served.name)
                raise CannotExplain(view.reason if view is not None else f"no tokenizer in {tokenizer}")
            repairer = Repairer(settings.repairs, settings.models, counter, Metrics())
            parse = parser_of("POST", path)
            ask, repairs = repairer.read(parse, body, "application/json", path, dialect_of(path), lambda _: served)
            return await _explained(ask, repairs, served, windows, settings, counter, trimmer)
        finally:
            trimmer.close()
            counter.close()


async def _explained(
    ask: Ask,
    repairs: tuple[str, ...],
    served: ServedModel,
    windows: Mapping[str, int],
    settings: Settings,
    counter: Counter,
    trimmer: Trimmer,
) -> Explanation:
    count = await counter.count(ask, served)
    chosen = choice_of(settings, ask, served.name, Signs())
    verdict = verdict_of(settings, ask, count, windows, served.name)
    found = await trimmer.history(ask, served, count)
    history = found[0] if found is not None else None
    shares, rest = _shares(ask, history)
    shorter: Shorter | Untrimmable | None = None
    if isinstance(verdict, Overflow) and chosen.policy in (Policy.AUTO, Policy.TRIM, Policy.LARGER):
        shorter = await trimmer.trim(ask, served, count, verdict)
    sent = b""
    if isinstance(verdict, Fits):
        sent = upstream_body(ask, verdict.offers[0])
    elif isinstance(shorter, Shorter):
        again = verdict_of(settings, shorter.ask, shorter.count, windows, served.name)
        sent = upstream_body(shorter.ask, again.offers[0]) if isinstance(again, Fits) else b""
    elif chosen.policy is Policy.PASS:
        sent = ask.body
    return Explanation(
        path=ask.path,
        model=served.name,
        repairs=repairs,
        prompt_tokens=count.total_tokens,
        count_kind=count.kind.value,
        count_source=count.source,
        messages=shares,
        rest_tokens=rest,
        windows=tuple(
            WindowView(name, window, _verdict(verdict_of(settings, ask, count, {name: window}, served.name)))
            for name, window in sorted(windows.items(), key=lambda item: item[1])
        ),
        policy=chosen.policy.value,
        policy_source=chosen.source,
        verdict=tuple(_sentences(verdict, chosen, shorter)),
        edits=tuple(_edits(shorter.report, history)) if isinstance(shorter, Shorter) and history else (),
        tokens_after=shorter.count.tokens if isinstance(shorter, Shorter) else None,
        body=sent,
    )


def _shares(ask: Ask, history: History | None) -> tuple[tuple[MessageShare, ...], int]:
    if history is None:
        return (), 0
    items = history.items
    return tuple(MessageShare(item.place + 1, item.role.value, item.tokens) for item in items), history.overhead_tokens


def _verdict(verdict: Fits | Overflow) -> str:
    if isinstance(verdict, Overflow):
        return f"overflow: {verdict.limit_tokens} at most"
    offer = verdict.offers[0]
    if offer.output_tokens is None:
        return "fits"
    return f"fits, output {'clamped to ' if offer.clamped else ''}{offer.output_tokens}"


def _sentences(verdict: Fits | Overflow, chosen: Choice, shorter: Shorter | Untrimmable | None) -> list[str]:
    if isinstance(verdict, Fits):
        return [f"It fits; first choice: {verdict.offers[0].backend}."]
    over = verdict.prompt_tokens - verdict.limit_tokens
    said = [f"It overflows by {over} tokens.", f"Policy {chosen.policy.value} (from: {chosen.source}):"]
    match chosen.policy:
        case Policy.REJECT:
            return [*said, "  refused with a context error."]
        case Policy.PASS:
            return [*said, "  sent as it is, for the backend to judge."]
        case Policy.AUTO:
            said.append("  refused if it is the conversation's first, then:")
        case Policy.LARGER:
            said.append("  sent to the larger model if that holds it, else:")
    if isinstance(shorter, Untrimmable):
        return [*said, f"  refused. {shorter.reason}"]
    if isinstance(shorter, Shorter):
        said.append(f"  trimmed to {shorter.count.tokens} tokens (cut {shorter.report.cuts} times so far).")
    return said


def _edits(report: Trimmed, history: History) -> list[str]:
    """What was removed, one line a kind or message; dropped messages that follow each other in one."""
    said: list[str] = []
    run: list[int] = []
    for edit in report.edits:
        if isinstance(edit, Drop) and run and edit.item == run[-1] + 1:
            run.append(edit.item)
            continue
        if run:
            said.append(_dropped(run, history))
            run = []
        match edit:
            case Drop(item=item):
                run = [item]
            case Shorten(item=item):
                said.append(f"message {history.items[item].place + 1}: shortened, {history.items[item].tokens} before")
            case DropReasoning(item=item):
                said.append(f"message {history.items[item].place + 1}: reasoning removed")
            case DropMedia(item=item):
                said.append(f"message {history.items[item].place + 1}: {len(history.items[item].media)} images removed")
            case Notice(text=text):
                said.append(f'noted: "{text}"')
    return said if not run else [*said, _dropped(run, history)]


def _dropped(run: list[int], history: History) -> str:
    places = [history.items[index].place + 1 for index in run]
    tokens = sum(history.items[index].tokens for index in run)
    which = f"message {places[0]}" if places[0] == places[-1] else f"messages {places[0]}-{places[-1]}"
    return f"{which}: dropped, {tokens} tokens"


def _with_model(body: bytes, model: str | None) -> bytes:
    """The body with a model's name, if it has none: for counting any name does."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return body
    if not isinstance(document, dict) or (document.get("model") and model is None):
        return body
    if document.get("model") == model:
        return body
    return json.dumps({**document, "model": model or "model"}).encode()


async def _served(urls: tuple[str, ...], wanted: str, *, must: bool) -> tuple[ServedModel, dict[str, int]]:
    """The model at the backends that serve it, and its window at each. Where a backend serves but one model, that is
    taken unless it ``must`` be ``wanted``."""
    found: list[tuple[BackendSettings, ModelCard, ModelCard]] = []
    names: set[str] = set()
    for url in urls:
        try:
            backend = BackendSettings(url=url)
        except ValueError:
            raise CannotExplain(f"--backend {url} is not an http(s) URL") from None
        try:
            cards = await cards_at(backend, TIMEOUT_S)
        except ProbeFailed as error:
            raise BackendFailed(f"{backend.url}/v1/models gave no list of models: {error}") from None
        names |= cards.keys()
        card = cards.get(wanted) or (next(iter(cards.values())) if len(cards) == 1 and not must else None)
        if card is not None:
            found.append((backend, card, cards.get(card.parent or "", card)))
    if not found:
        served = ", ".join(sorted(names)) or "none"
        raise CannotExplain(f"no backend serves {wanted}; served are: {served} (see --model)")
    _, first, owner = found[0]
    serving = [(backend, card) for backend, card, _ in found if card.id == first.id]
    windows = {backend.label: card.window_tokens or 0 for backend, card in serving}
    return ServedModel(first.id, owner.root or owner.id, tuple(backend.url for backend, _ in serving)), windows
