"""Repairs wired up: parse, repair what vLLM would refuse, and read what came of it; facts of a model are kept."""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from gateway.api.body import parse_object
from gateway.api.repairs.repair import repaired_body
from gateway.config import ModelSettings, RepairSettings
from gateway.exceptions import BadRequest
from gateway.observe.metrics import Metrics
from gateway.tokens.local import LocalCounter
from gateway.tokens.service import Counter, ServedModel
from gateway.tokens.traits import facts_of
from gateway.types import Ask, Dialect, ModelFacts

log = logging.getLogger("kvgate.repairs")

Parse = Callable[[bytes, str | None, str], Ask]

_RELEASE = re.compile(r"v?(\d+)\.(\d+)")


class Repairer:
    """Reads requests, repaired where that is needed."""

    def __init__(
        self, settings: RepairSettings, models: Mapping[str, ModelSettings], counter: Counter, metrics: Metrics
    ) -> None:
        self._disabled: frozenset[str] = frozenset(settings.disable)
        self._models = models
        self._counter = counter
        self._metrics = metrics
        self._facts: weakref.WeakKeyDictionary[LocalCounter, dict[str | None, ModelFacts]] = weakref.WeakKeyDictionary()

    def read(
        self,
        parse: Parse,
        body: bytes,
        content_type: str | None,
        path: str,
        dialect: Dialect,
        served: Callable[[str], ServedModel | None],
    ) -> tuple[Ask, tuple[str, ...]]:
        """The request in ``body`` and the names of the repairs it needed. Raises ``BadRequest``.

        ``served`` gives what is known of a model by its name. The body is parsed a second time only where a rule
        changed it, or where ``parse`` could make nothing of it.
        """
        try:
            ask = parse(body, content_type, path)
        except BadRequest:
            # It may be another API's body. What is no JSON object raises as it did before.
            document = parse_object(body, content_type)
            name = document.get("model")
            repaired = self._repaired(body, document, dialect, served(name if isinstance(name, str) else ""))
            if repaired is None:
                raise
        else:
            if not ask.document:
                return ask, ()
            repaired = self._repaired(body, ask.document, dialect, served(ask.model))
            if repaired is None:
                return ask, ()
        body, names = repaired
        ask = parse(body, content_type, path)
        for name in names:
            self._metrics.repairs.labels(name).inc()
        return ask, names

    def _repaired(
        self, body: bytes, document: Mapping[str, Any], dialect: Dialect, model: ServedModel | None
    ) -> tuple[bytes, tuple[str, ...]] | None:
        """A failure here must not fail a request that the backend may well serve."""
        try:
            return repaired_body(body, document, dialect, self.facts(model), self._disabled)
        except Exception:
            log.exception("a request could not be looked through for repairs; it goes on as it came")
            return None

    def facts(self, model: ServedModel | None) -> ModelFacts:
        """What is known of the template of ``model``; nothing while its tokenizer is not loaded."""
        if model is None:
            return ModelFacts()
        local = self._counter.local(model)
        if local is None:
            return ModelFacts(_release(model.vllm_version))
        known = self._facts.setdefault(local, {})
        facts = known.get(model.vllm_version)
        if facts is None:
            override = self._models.get(model.name)
            kwargs = override.default_chat_template_kwargs if override else {}
            facts = known[model.vllm_version] = facts_of(local, kwargs, _release(model.vllm_version))
        return facts


def _release(version: str | None) -> tuple[int, int] | None:
    found = _RELEASE.match(version or "")
    return (int(found[1]), int(found[2])) if found else None
