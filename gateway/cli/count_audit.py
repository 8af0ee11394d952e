"""``kvgate count --audit``: replays a file of requests against a backend and prints where our counts differ."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter as Tally
from collections.abc import Mapping
from typing import Any

import httpx2

from gateway.auditing import CountOf, Finding, Sample, audit, samples
from gateway.cli.served import TIMEOUT_S, BadInput, served
from gateway.config import CountingSettings, ModelSettings, base_url
from gateway.tokens.service import Counter, ServedModel

# The widest line is 59 characters, so that a table fits a terminal split in two.
_SHORT = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}
_WIDTHS = "{:>6}  {:<12} {:<12} {:>8} {:>8} {:>7}"


def run(options: argparse.Namespace, text: bytes) -> int:
    """Audit and print. 1 if a count called exact was wrong or nothing was compared, else 0. Raises ``BadInput``."""
    try:
        requests = list(samples(text.decode("utf-8-sig", "surrogatepass").splitlines()))
    except ValueError as error:
        raise BadInput(str(error)) from None
    findings = asyncio.run(_findings(options, requests))
    compared = [finding for finding in findings if finding.difference is not None]
    if options.json:
        print(json.dumps({"summary": _summary(findings), "requests": [_document(finding) for finding in findings]}))
    else:
        _print(findings)
    return 1 if not compared or any(finding.wrong for finding in findings) else 0


async def _findings(options: argparse.Namespace, requests: list[Sample]) -> list[Finding]:
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    asked = next((str(sample.document["model"]) for sample in requests if sample.document.get("model")), "")
    async with httpx2.AsyncClient(trust_env=False, timeout=httpx2.Timeout(600, connect=TIMEOUT_S)) as client:

        async def post(url: str, body: Any, sent: Mapping[str, str], timeout_s: float) -> tuple[int, dict[str, Any]]:
            response = await client.post(url, json=body, headers=dict(sent), timeout=timeout_s)
            return response.status_code, response.json()

        model = await served(options.backend, options.model or asked, options.model is not None, options.api_key)
        url = base_url(options.backend)
        if options.gateway:
            return [item async for item in audit(client, url, headers, requests, model.name, None)]
        if options.api_key:
            model = ServedModel(model.name, model.root, model.backends, {url: options.api_key})
        override = ModelSettings(chat_template=options.chat_template, tokenizer=options.tokenizer)
        counter = Counter(CountingSettings(backend_timeout_s=TIMEOUT_S), {model.name: override}, post)
        try:
            await counter.warm(model)
            count: CountOf = lambda ask: counter.count(ask, model)  # noqa: E731 - a closure with a type
            return [item async for item in audit(client, url, headers, requests, model.name, count)]
        finally:
            counter.close()


def _summary(findings: list[Finding]) -> dict[str, Any]:
    kinds = Tally(
        "refused"
        if finding.theirs is None
        else "not counted"
        if finding.ours is None
        else "wrong"
        if finding.wrong
        else "exact"
        if finding.kind == "exact"
        else "estimated"
        for finding in findings
    )
    return {"requests": len(findings), **{name: kinds[name] for name in _OUTCOMES}}


_OUTCOMES = ("exact", "wrong", "estimated", "not counted", "refused")


def _document(finding: Finding) -> dict[str, Any]:
    return {
        "line": finding.number,
        "path": finding.path,
        "kind": finding.kind,
        "source": finding.source,
        "ours": finding.ours,
        "usage": finding.theirs,
        "difference": finding.difference,
        **({"refusal": finding.refusal} if finding.refusal else {}),
    }


def _print(findings: list[Finding]) -> None:
    shown = [finding for finding in findings if finding.difference or finding.theirs is None]
    if shown:
        print(_WIDTHS.format("line", "request", "source", "ours", "usage", "differ"))
    for finding in shown:
        name = _SHORT.get(finding.path, finding.path.rsplit("/", 1)[-1])[:12]
        if finding.theirs is None:
            print(f"{finding.number:>6}  {name:<12} refused: {finding.refusal[:60]}")
            continue
        difference = f"{finding.difference:+d}" if finding.kind == "exact" else f"~{finding.difference:+d}"
        print(_WIDTHS.format(finding.number, name, finding.source[:12], finding.ours, finding.theirs, difference))
    summary = _summary(findings)
    told = ", ".join(f"{summary[name]} {name}" for name in _OUTCOMES if summary[name] or name in ("exact", "wrong"))
    print(f"{summary['requests']} requests: {told}")
