"""``kvgate status``: backends, windows, KV caches and the queue of a running gateway."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

DEFAULT_URL = "http://127.0.0.1:8080"
TIMEOUT_S = 10.0
WIDTH = 60
UNKNOWN = "?"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--url", default=DEFAULT_URL, help="base URL of the gateway (default %(default)s)")
    parser.add_argument("--api-key", help="one of the gateway's API keys (default: environment OPENAI_API_KEY)")
    parser.add_argument("--json", action="store_true", help="print the gateway's answer as it is")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the state of the gateway. 1 if it cannot be reached or refuses, 3 if no backend is up."""
    import httpx2

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
        hint = " Give one of its keys with --api-key." if error.response.status_code == 401 else ""
        return _fail(f"{url} answered {error.response.status_code}.{hint}")
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        return _fail(f"cannot reach a gateway at {url}: {error}")
    except ValueError:
        return _fail(f"{url} is not a kvgate: /kvgate/status is not JSON")
    if not isinstance(document, dict) or not isinstance(document.get("backends"), list):
        return _fail(f"{url} is not a kvgate: /kvgate/status has no backends")
    print(json.dumps(document, indent=2) if options.json else table(document))
    return 0 if any(backend.get("health") == "up" for backend in document["backends"]) else 3


def table(document: Mapping[str, Any]) -> str:
    """The document of ``/kvgate/status`` for a terminal of 60 columns. What is not known is shown as ``?``."""
    lines: list[str] = []
    for backend in document["backends"]:
        events = [each for each in document.get("kv_events", ()) if each.get("backend") == backend.get("name")]
        lines += [*_backend(backend), *map(_events, events), ""]
    if not document["backends"]:
        lines += ["no backends", ""]
    waiting, longest_s = document.get("waiting_requests"), document.get("oldest_wait_s")
    queue = f"queue  {_number(waiting)} waiting"
    if waiting:
        queue += f", longest {_number(longest_s)} s, {_number(document.get('waiting_bytes'))} bytes"
    return "\n".join([*lines, queue])


def _backend(backend: Mapping[str, Any]) -> list[str]:
    """The lines of one backend: who and how it is, its models, its KV cache, its requests."""
    health = str(backend.get("health", UNKNOWN))
    condition = str(backend.get("condition", health))
    if condition not in (health, "draining", "failing", "warming"):  # said by what follows, or by nothing
        health = condition
    if backend.get("draining"):
        health += ", draining"
    if backend.get("breaker", "closed") != "closed":
        health += f", breaker {str(backend['breaker']).replace('_', ' ')}"
    version = backend.get("version")
    lines = [_both(str(backend.get("name", UNKNOWN)), health + (f"  vLLM {version}" if version else ""))]
    if backend.get("error"):
        lines.append(_cut(f"  {backend['error']}"))
    for trouble in backend.get("troubles", ()):
        detail = f": {trouble['detail']}" if trouble.get("detail") else ""
        lines.append(_both(_cut(f"  ! {trouble.get('kind', UNKNOWN)}{detail}"), f"since {_age(trouble.get('age_s'))}"))
    lines += [
        _both(f"  {model.get('id', UNKNOWN)}", f"window {_number(model.get('window_tokens'))}")
        for model in backend.get("models", ())
    ]
    lines.append(_both("  KV cache", _kv(backend.get("kv"))))
    engines = backend.get("engines", ())
    for engine in engines if len(engines) > 1 else ():
        name = f"    engine {engine.get('engine', UNKNOWN)}, {_number(engine.get('in_flight'))} in flight"
        lines.append(_both(name, _kv(engine.get("kv"))))
    numbers = (("in flight", "in_flight"), ("running", "running"), ("waiting", "waiting"))
    requests = "   ".join(f"{label} {_number(backend.get(key))}" for label, key in numbers)
    lines.append(_both(f"  {requests}", f"seen {_age(backend.get('age_s'))}"))
    return lines


def _events(events: Mapping[str, Any]) -> str:
    """How much of an engine's prefix cache its KV events tell."""
    rank = events.get("rank")
    name = f"  prefixes of engine {rank}" if rank else "  prefixes"
    heard = f"heard {_age(events.get('age_s'))}" if events.get("connected") else "not connected"
    return _both(name, f"{events.get('knowledge', UNKNOWN)}, {_number(events.get('blocks'))} blocks, {heard}")


def _kv(kv: Mapping[str, Any] | None) -> str:
    if not kv:
        return "unknown"
    stale = " (old)" if kv.get("stale") else ""
    used, capacity = _number(kv.get("used_tokens")), _number(kv.get("capacity_tokens"))
    ratio = kv.get("usage_ratio")
    return f"{used} / {capacity} tokens  {UNKNOWN if ratio is None else format(ratio, '.0%')}{stale}"


def _age(age_s: float | None) -> str:
    return "never" if age_s is None else f"{age_s:.1f} s ago" if age_s < 60 else f"{age_s / 60:.0f} min ago"


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,.0f}"


def _both(left: str, right: str) -> str:
    """A line with one text at each end; the left one is cut if they do not fit."""
    room = max(12, WIDTH - len(right) - 1)
    return f"{_cut(left, room):<{room}} {right}"


def _cut(text: str, room: int = WIDTH) -> str:
    return text if len(text) <= room else text[: room - 1] + "…"


def _fail(message: str) -> int:
    print(f"kvgate status: {message}", file=sys.stderr)
    return 1
