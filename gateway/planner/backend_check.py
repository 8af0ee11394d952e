"""A running vLLM server checked from outside: reachable, window and capacity, flags that matter, plan and truth."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from gateway.planner import pool as pools
from gateway.planner.bounded import Answer, Asker, Unanswered
from gateway.planner.errors import PlannerError
from gateway.planner.figures import GIB, gib_text, tokens_text
from gateway.planner.plan import Plan, make_plan
from gateway.planner.versions import behaviour_of
from gateway.planner.wish import Wish

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_TOOL = {
    "type": "function",
    "function": {"name": "noop", "description": "Does nothing.", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. ``state`` is ok, info, warning or error."""

    name: str
    state: str
    text: str
    change: str = ""


@dataclass(slots=True)
class BackendReport:
    """All checks and what was learnt on the way; unknown is None."""

    url: str
    checks: list[Check] = field(default_factory=list)
    version: str | None = None
    model: str | None = None
    window: int | None = None
    kv_tokens: int | None = None
    num_blocks: int | None = None
    cache: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, state: str, text: str, change: str = "") -> None:
        self.checks.append(Check(name, state, text, change))

    def as_json(self) -> dict[str, object]:
        return {
            "url": self.url,
            "vllm_version": self.version,
            "model": self.model,
            "max_model_len": self.window,
            "kv_cache_size_tokens": self.kv_tokens,
            "num_gpu_blocks": self.num_blocks,
            "cache_config": self.cache,
            "checks": [
                {"name": check.name, "state": check.state, "text": check.text, "change": check.change or None}
                for check in self.checks
            ],
        }


def check_backend(
    url: str,
    *,
    api_key: str | None = None,
    model: str | None = None,
    gpu: str | None = None,
    timeout_s: float = 30.0,
    send_request: bool = True,
) -> BackendReport:
    """Ask the server. Never raises for what the server does; a failed step is a check of its own."""
    base = url.rstrip("/").removesuffix("/v1")
    report = BackendReport(base)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with Asker(base, headers=headers, timeout_s=timeout_s) as client:
            if not _health(report, client):
                return report
            _version(report, client)
            _models(report, client)
            _metrics(report, client)
            _capacity(report)
            _settings(report)
            _kv_events(report, client)
            if send_request and report.model:
                _request(report, client)
                _tools(report, client)
    except Unanswered as error:
        report.add("connection", "error", f"The server {error}.")
    _compare(report, model, gpu)
    return report


def cache_config_labels(text: str) -> list[dict[str, str]]:
    """The labels of every ``vllm:cache_config_info`` sample, one dict an engine. Parsed by name, never by position."""
    lines = (line for line in text.splitlines() if line.startswith("vllm:cache_config_info{"))
    return [dict(_LABEL.findall(line)) for line in lines]


def _health(report: BackendReport, client: Asker) -> bool:
    try:
        status = client.get("/health").status_code
    except Unanswered as error:
        report.add(
            "health",
            "error",
            f"{report.url or 'An empty URL'} {error}.",
            "check the URL and `docker ps`",
        )
        return False
    if status == 503:
        report.add(
            "health", "error", "The engine is dead (503): read its log with kvgate doctor.", "restart the server"
        )
        return False
    ok = status == 200
    report.add("health", "ok" if ok else "warning", "answers" if ok else f"/health says {status}")
    return True


def _version(report: BackendReport, client: Asker) -> None:
    answer = _json(client, "/version")
    report.version = str(answer["version"]) if isinstance(answer, dict) and "version" in answer else None
    report.add("version", "info", report.version or "unknown: /version is not there (not vLLM, or a proxy)")


def _models(report: BackendReport, client: Asker) -> None:
    response = client.get("/v1/models")
    if response.status_code == 401:
        report.add("models", "error", "The server wants an API key.", "--api-key KEY")
        return
    answer = _json(client, "/v1/models")
    entries = answer.get("data") if isinstance(answer, dict) else None
    first = entries[0] if isinstance(entries, list) and entries else None
    if not isinstance(first, dict) or not isinstance(first.get("id"), str):
        report.add("models", "error", "/v1/models lists no model: is this an OpenAI-compatible server?")
        return
    report.model = first["id"]
    window = first.get("max_model_len")
    report.window = int(window) if isinstance(window, int) else None
    shown = tokens_text(report.window) if report.window else "unknown"
    report.add("window", "ok" if report.window else "warning", f"{report.model}: max_model_len {shown}")


def _metrics(report: BackendReport, client: Asker) -> None:
    response = client.get("/metrics")
    if response.status_code != 200 or "vllm:" not in response.text:
        report.add(
            "metrics",
            "error",
            "No vllm: metrics at /metrics: load and KV use are invisible to a gateway.",
            "remove --disable-log-stats",
        )
        return
    engines = cache_config_labels(response.text)
    if not engines:
        report.add("metrics", "warning", "Metrics are there, but no vllm:cache_config_info.")
        return
    report.cache = engines[0]
    report.num_blocks = _whole(engines[0].get("num_gpu_blocks"))
    if report.num_blocks is not None and len(engines) > 1:
        # With data parallelism the total of all engines stands on each of them.
        report.num_blocks //= len(engines)
    report.kv_tokens = _whole(engines[0].get("kv_cache_size_tokens"))
    plural = f"{len(engines)} engines" if len(engines) > 1 else "1 engine"
    report.add("metrics", "ok", f"visible, {plural}")


def _capacity(report: BackendReport) -> None:
    tokens, exact = report.kv_tokens, True
    block = _whole(report.cache.get("block_size"))
    if tokens is None and report.num_blocks and block:
        tokens, exact = report.num_blocks * block, False
    if tokens is None or not report.window:
        report.add(
            "capacity", "warning", "KV capacity unknown: this release does not export it; read the start-up log."
        )
        return
    held = tokens / report.window
    note = "" if exact else " (blocks x block size: wrong for hybrid and sliding-window models)"
    text = f"{tokens_text(tokens)} KV tokens = {held:.2f} full windows of {tokens_text(report.window)}{note}"
    if held < 1.1:
        report.add(
            "capacity", "warning", f"{text}: a second long request always queues.", f"--max-model-len {tokens // 2}"
        )
    else:
        report.add("capacity", "ok", text)


def _settings(report: BackendReport) -> None:
    if not report.cache:
        return
    caching = report.cache.get("enable_prefix_caching")
    if caching == "True":
        report.add("prefix caching", "ok", "on")
    elif caching in ("False", "None"):
        report.add(
            "prefix caching", "warning", "off: every turn of an agent is prefilled anew.", "--enable-prefix-caching"
        )
    dtype = report.cache.get("cache_dtype")
    if dtype:
        report.add("KV dtype", "info", f"{dtype}, utilisation {report.cache.get('gpu_memory_utilization', 'unknown')}")


def _kv_events(report: BackendReport, client: Asker) -> None:
    """Whether the gateway will know its prefix cache or guess at it (vLLM 0.31 and later say so)."""
    if report.cache.get("enable_prefix_caching") != "True":
        return
    sources = _json(client, "/kv_event_sources")
    if not isinstance(sources, dict):
        return
    engines = [each for each in sources.values() if isinstance(each, dict)]
    if not engines:
        report.add("KV events", "info", "not published: what is cached is guessed (docs/placing.md)")
    elif all(each.get("replay_endpoint") for each in engines):
        report.add("KV events", "ok", f"published by {len(engines)} engine(s), missed ones are sent again")
    else:
        text = "published without a replay_endpoint: a gateway that comes later than the server knows a part"
        report.add("KV events", "info", text, '--kv-events-config with "replay_endpoint": "tcp://*:PORT"')


def _request(report: BackendReport, client: Asker) -> None:
    body = {"model": report.model, "messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 4}
    answer = client.post("/v1/chat/completions", body)
    if answer.status_code == 200:
        said = answer.json()
        if not isinstance(said, dict) or "choices" not in said:
            report.add("request", "error", "A chat is answered with 200, but with no completion: not a model server.")
            return
        usage = said.get("usage")
        usage = usage if isinstance(usage, dict) else {}
        report.add(
            "request", "ok", f"answered, usage {usage.get('prompt_tokens')} + {usage.get('completion_tokens')} tokens"
        )
        return
    plain = client.post("/v1/completions", {"model": report.model, "prompt": "Hi", "max_tokens": 4})
    if plain.status_code == 200:
        report.add(
            "request",
            "warning",
            f"Completions work, chat does not ({_error_text(answer)}).",
            "--chat-template FILE when the model ships none",
        )
    else:
        report.add("request", "error", f"A request of one sentence fails: {plain.status_code} {_error_text(plain)}")


def _tools(report: BackendReport, client: Asker) -> None:
    body: dict[str, Any] = {
        "model": report.model,
        "messages": [{"role": "user", "content": "Say hi."}],
        "max_tokens": 4,
        "tools": [_TOOL],
        "tool_choice": "auto",
    }
    answer = client.post("/v1/chat/completions", body)
    if answer.status_code == 200:
        report.add("tool calls", "ok", "a tool-call parser is set")
        return
    text = _error_text(answer)
    if "tool-call-parser" in text or "auto-tool-choice" in text or "tool_call_parser" in text:
        report.add(
            "tool calls",
            "error",
            "No tool-call parser: every coding agent fails on this server.",
            "--enable-auto-tool-choice --tool-call-parser NAME (hermes for Qwen2.5, qwen3_coder for Qwen3-Coder, "
            "llama3_json, mistral, openai for gpt-oss)",
        )
    else:
        report.add("tool calls", "warning", f"A request with a tool fails: {answer.status_code} {text}")


def _compare(report: BackendReport, model: str | None, gpu: str | None) -> None:
    """The plan for the served model against what the server exports."""
    from gateway.planner.cards import card_of_memory, find_card
    from gateway.planner.source import load_subject

    name = model or report.model
    if not name or not report.window or not report.num_blocks:
        return
    try:
        subject = load_subject(name, offline=True)
        card = find_card(gpu) if gpu else card_of_memory(24.0)
        block = _whole(report.cache.get("block_size"))
        utilization = report.cache.get("gpu_memory_utilization")
        wish = Wish(
            context=report.window,
            kv_dtype=report.cache.get("cache_dtype", "auto"),
            utilization=float(utilization) if gpu and utilization else None,
            block_tokens=None if subject.geometry.hybrid else block,
            prefix_caching=report.cache.get("enable_prefix_caching") != "False",
        )
        plan = make_plan(subject, card, wish, behaviour_of(report.version), compare=False)
    except (PlannerError, ValueError) as error:
        report.add("plan", "info", f"no comparison: {error}")
        return
    _compare_tokens(report, plan)
    if gpu:
        _compare_memory(report, plan)


def _compare_tokens(report: BackendReport, plan: Plan) -> None:
    if not report.kv_tokens or report.window is None or report.num_blocks is None:
        return
    expected = pools.capacity(plan.pool, report.num_blocks * plan.pool.block_bytes, report.window, plan.behaviour)
    off = expected.size_tokens / report.kv_tokens - 1
    if abs(off) <= 0.005:
        report.add(
            "plan", "ok", f"agrees: {tokens_text(report.kv_tokens)} tokens from {tokens_text(report.num_blocks)} blocks"
        )
    else:
        report.add(
            "plan",
            "warning",
            f"The plan gives {tokens_text(expected.size_tokens)} tokens for {tokens_text(report.num_blocks)} "
            f"blocks, the server "
            f"says {tokens_text(report.kv_tokens)} ({off:+.1%}): is this the model the server loaded (--model), "
            f"with a drafter, or with "
            "tensor parallelism over sliding layers?",
        )


def _compare_memory(report: BackendReport, plan: Plan) -> None:
    if report.num_blocks is None:
        return
    real = report.num_blocks * plan.pool.block_bytes / GIB
    low, high = plan.kv_memory.lowest, plan.kv_memory.highest
    inside = low <= real <= high
    report.add(
        "KV memory",
        "ok" if inside else "info",
        f"{gib_text(real)} on the server, planned {gib_text(plan.kv_memory.value)} ({low:.1f} .. {high:.1f})"
        + ("" if inside else ": one GPU of a group (--tp), or other flags, explain a difference"),
    )


def _json(client: Asker, path: str) -> Any:
    response = client.get(path)
    return response.json() if response.status_code == 200 else None


def _error_text(response: Answer) -> str:
    body = response.json()
    if body is None:
        return response.text[:200]
    if isinstance(body, dict):
        error = body.get("error")
        message = error.get("message") if isinstance(error, dict) else body.get("message")
        return str(message or body)[:300]
    return str(body)[:200]


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None
