"""``kvgate status``: backends, windows, KV caches and the queue of a running gateway."""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

DEFAULT_URL = "http://127.0.0.1:8080"
TIMEOUT_S = 10.0
WIDTH = 80
# These words for how a backend stands are said by what stands beside them, or by nothing that matters.
IMPLIED = ("draining", "failing", "warming")
# A backend that stands so tells nothing of now: what it told before it went is not its state.
SILENT = ("down", "starting", "unknown")
UNKNOWN = "?"
ELSEWHERE = "Another address: --url http://HOST:PORT"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--url", default=DEFAULT_URL, help="base URL of the gateway (default %(default)s)")
    parser.add_argument("--api-key", help="one of the gateway's API keys (default: environment OPENAI_API_KEY)")
    parser.add_argument("--json", action="store_true", help="print the gateway's answer as it is")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the state of the gateway. 1 if it cannot be reached or refuses, 3 if no backend takes new requests."""
    import httpx2

    from gateway.fleet.unreachable import cause_of

    url = options.url.strip().rstrip("/").removesuffix("/v1")
    if "://" not in url:
        url = "http://" + url
    key = options.api_key or os.environ.get("OPENAI_API_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        response = httpx2.get(f"{url}/kvgate/status", headers=headers, timeout=TIMEOUT_S, trust_env=False)
        response.raise_for_status()
        document = response.json()
    except httpx2.HTTPStatusError as error:
        code = error.response.status_code
        hint = "Give one of its keys with --api-key." if code in (401, 403) else "Is it a kvgate? " + ELSEWHERE
        return _fail(f"{url} answered {code}. {hint}")
    except httpx2.ConnectError as error:
        return _fail(f"cannot reach a gateway at {url}: {cause_of(error).words}.\n  Is it running? {ELSEWHERE}")
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        why = str(error).rstrip(".") or type(error).__name__
        return _fail(f"cannot reach a gateway at {url}: {why}.\n  {ELSEWHERE}")
    except ValueError:
        return _fail(f"{url} is not a kvgate: /kvgate/status is not JSON. {ELSEWHERE}")
    if not isinstance(document, dict) or not isinstance(document.get("backends"), list):
        return _fail(f"{url} is not a kvgate: /kvgate/status has no backends. {ELSEWHERE}")
    print(json.dumps(document, indent=2) if options.json else table(document))
    return 0 if any(map(_takes_new, document["backends"])) else 3


def table(document: Mapping[str, Any]) -> str:
    """The document of ``/kvgate/status`` for a terminal of 80 columns. What is not known is shown as ``?``."""
    lines: list[str] = []
    for backend in document["backends"]:
        events = [each for each in document.get("kv_events", ()) if each.get("backend") == backend.get("name")]
        lines += [*_backend(backend), *_events(events, _condition(backend)), ""]
    if not document["backends"]:
        lines += ["no backends", ""]
    waiting, longest_s = document.get("waiting_requests"), document.get("oldest_wait_s")
    queue = f"queue  {_number(waiting)} waiting"
    if waiting:
        queue += f", longest {_number(longest_s)} s, {_number(document.get('waiting_bytes'))} bytes"
        if document.get("kept_out_requests"):
            queue += "\n       room is kept for conversations about to return (placing.keep_ratio)"
    return "\n".join([*lines, queue])


def _takes_new(backend: Mapping[str, Any]) -> bool:
    """Whether new requests go there, as the gateway's ``/ready`` sees it."""
    return backend.get("health") == "up" and not backend.get("draining") and _condition(backend) != "standby"


def _condition(backend: Mapping[str, Any]) -> str:
    return str(backend.get("condition", backend.get("health", UNKNOWN)))


def _backend(backend: Mapping[str, Any]) -> list[str]:
    """The lines of one backend: who and how it is, its models, its KV cache, its requests."""
    health, condition = str(backend.get("health", UNKNOWN)), _condition(backend)
    if condition not in (health, *IMPLIED):
        health = condition
    if condition == "starting" and str(backend.get("error")).startswith("cannot connect"):
        health += ", or not there"
    if backend.get("draining"):
        health += ", drained: no new requests" if backend.get("in_flight") == 0 else ", draining: no new requests"
    if backend.get("breaker", "closed") != "closed":
        health += f", breaker {str(backend['breaker']).replace('_', ' ')}"
    version = backend.get("version")
    lines = [_both(str(backend.get("name", UNKNOWN)), health + (f"  vLLM {version}" if version else ""))]
    error = str(backend.get("error") or "")
    troubles = [each for each in backend.get("troubles", ()) if not _said(each, error, condition)]
    if error and not any(error == each.get("detail") for each in troubles):
        lines += _wrapped(error)
    for trouble in troubles:
        detail = f": {trouble['detail']}" if trouble.get("detail") else ""
        lines += _wrapped(f"! {trouble.get('kind', UNKNOWN)}{detail} (for {_span(trouble.get('age_s'))})")
    lines += [
        _both(f"  {model.get('id', UNKNOWN)}", f"window {_number(model.get('window_tokens'))}")
        for model in backend.get("models", ())
    ]
    if condition in SILENT:
        age_s = backend.get("age_s")
        seen = "never seen" if age_s is None else f"last seen {_span(age_s)} ago"
        return [*lines, _both(f"  in flight {_number(backend.get('in_flight'))}", seen)]
    lines.append(_both("  KV cache", _kv(backend.get("kv"))))
    engines = backend.get("engines", ())
    for engine in engines if len(engines) > 1 else ():
        name = f"    engine {engine.get('engine', UNKNOWN)}, {_number(engine.get('in_flight'))} in flight"
        lines.append(_both(name, _kv(engine.get("kv"))))
    numbers = (("in flight", "in_flight"), ("running", "running"), ("waiting", "waiting"))
    requests = "   ".join(f"{label} {_number(backend.get(key))}" for label, key in numbers)
    age_s = backend.get("age_s")
    lines.append(_both(f"  {requests}", "metrics never read" if age_s is None else f"seen {_span(age_s)} ago"))
    return lines


def _said(trouble: Mapping[str, Any], error: str, condition: str) -> bool:
    """Whether the error says it already: why a server does not answer is why its metrics cannot be read."""
    return bool(error) and trouble.get("kind") == "metrics_failing" and condition in SILENT


def _events(engines: Sequence[Mapping[str, Any]], condition: str) -> list[str]:
    """How much of each engine's prefix cache its KV events tell."""
    if condition in SILENT:
        return []
    lines = []
    for events in engines:
        name = f"  prefixes of engine {events.get('rank', UNKNOWN)}" if len(engines) > 1 else "  prefixes"
        age_s = events.get("age_s")
        heard = "nothing heard yet" if age_s is None else f"heard {_span(age_s)} ago"
        known = f"{events.get('knowledge', UNKNOWN)}, {_number(events.get('blocks'))} blocks, {heard}"
        lines.append(_both(name, known if events.get("connected") else f"not connected, {heard}"))
    return lines


def _kv(kv: Mapping[str, Any] | None) -> str:
    if not kv:
        return "unknown"
    stale = " (old)" if kv.get("stale") else ""
    used, capacity = _number(kv.get("used_tokens")), _number(kv.get("capacity_tokens"))
    ratio = kv.get("usage_ratio")
    return f"{used} / {capacity} tokens  {UNKNOWN if ratio is None else format(ratio, '.0%')}{stale}"


def _span(seconds: float | None) -> str:
    if seconds is None:
        return UNKNOWN
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,.0f}"


def _both(left: str, right: str) -> str:
    """A line with one text at each end; the left one is cut if they do not fit."""
    room = max(12, WIDTH - len(right) - 1)
    return f"{_cut(left, room):<{room}} {right}"


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else text[: room - 1] + "…"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), WIDTH, initial_indent="  ", subsequent_indent="    ")


def _fail(message: str) -> int:
    print(f"kvgate status: {message}", file=sys.stderr)
    return 1
