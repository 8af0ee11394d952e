"""``kvgate client-config``: the settings to paste so that an agent knows the true window and output limit."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gateway.planner.client_settings import Endpoint

_DEFAULT_URL = "http://127.0.0.1:8080"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    from gateway.planner.client_settings import CLIENTS

    parser.add_argument("client", choices=sorted(CLIENTS), help="the agent or chat client")
    parser.add_argument("--backend", metavar="URL", help="read model and window from a running gateway or vLLM server")
    parser.add_argument("--plan", metavar="FILE", help="read them from `kvgate plan --json` output (- for stdin)")
    parser.add_argument("--url", help=f"the address the client shall use (default: --backend, else {_DEFAULT_URL})")
    parser.add_argument("--model", help="model name as served")
    parser.add_argument(
        "--window", type=int, metavar="TOKENS", help="the window, when neither --backend nor --plan says it"
    )
    parser.add_argument(
        "--max-output", type=int, metavar="TOKENS", help="output limit (default: a quarter, at most 32000)"
    )
    parser.add_argument("--api-key", default="none", help="the key the client shall send")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the settings of one client."""
    from gateway.planner.client_settings import CLIENTS, settings_for
    from gateway.planner.errors import PlannerError

    try:
        endpoint = _endpoint(options)
    except PlannerError as error:
        print(f"kvgate client-config: {error}", file=sys.stderr)
        return 2
    settings = settings_for(options.client, endpoint)
    if options.json:
        shape = {
            "client": options.client,
            "model": endpoint.model,
            "window": endpoint.window,
            "max_output": endpoint.output,
            "settings": [{"where": one.where, "text": one.text, "notes": list(one.notes)} for one in settings],
        }
        print(json.dumps(shape, indent=2))
        return 0
    print(f"{CLIENTS[options.client][0]}: {endpoint.model}, window {endpoint.window:,}, output {endpoint.output:,}")
    for setting in settings:
        print(f"\n# {setting.where}\n{setting.text}")
        for note in setting.notes:
            print(f"# note: {note}")
    return 0


def _endpoint(options: argparse.Namespace) -> Endpoint:
    from gateway.planner.client_settings import Endpoint, output_limit
    from gateway.planner.errors import PlannerError

    model, window = options.model, options.window
    if options.plan:
        planned = _read_plan(options.plan)
        model = model or planned.get("model")
        window = window or planned.get("recommended_max_model_len") or planned.get("max_model_len")
    if options.backend and not (model and window):
        found_model, found_window = _ask(options.backend, options.model, options.api_key)
        model, window = model or found_model, window or found_window
    if not model or not window:
        missing = " and ".join(name for name, value in (("--model", model), ("--window", window)) if not value)
        raise PlannerError(f"give {missing}, or --backend URL, or --plan FILE from kvgate plan --json.")
    if window < 2:
        raise PlannerError(f"a window of {window} tokens serves no client.")
    base = (options.url or options.backend or _DEFAULT_URL).rstrip("/").removesuffix("/v1")
    return Endpoint(base, model, int(window), output_limit(int(window), options.max_output), options.api_key)


def _ask(url: str, model: str | None, api_key: str) -> tuple[str | None, int | None]:
    from gateway.planner.bounded import Asker, Unanswered
    from gateway.planner.errors import PlannerError

    base = url.rstrip("/").removesuffix("/v1")
    try:
        with Asker(base, headers={"Authorization": f"Bearer {api_key}"}, timeout_s=10.0) as asker:
            answer = asker.get("/v1/models")
    except Unanswered as error:
        raise PlannerError(f"{base} {error}.") from error
    listed = answer.json()
    data = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(data, list):
        raise PlannerError(f"{base} gives no model list: it answers {answer.status_code} with something else.")
    entries = [entry for entry in data if isinstance(entry, dict)]
    chosen = next((entry for entry in entries if model in (None, entry.get("id"))), None)
    if chosen is None:
        names = ", ".join(str(entry.get("id")) for entry in entries) or "none"
        raise PlannerError(f"{base} does not serve {model!r}; it serves: {names}.")
    window = chosen.get("max_model_len") or chosen.get("context_length")
    return chosen.get("id"), window if isinstance(window, int) else None


def _read_plan(source: str) -> dict[str, Any]:
    from gateway.planner.errors import PlannerError

    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
        parsed = json.loads(text)
    except (OSError, ValueError) as error:
        raise PlannerError(f"{source} is not the output of kvgate plan --json ({error}).") from error
    if not isinstance(parsed, dict):
        raise PlannerError(f"{source} is not the output of kvgate plan --json.")
    return parsed
