"""``make conformance``: our counts held against ``usage.prompt_tokens`` of real vLLM servers, family by family.

A tiny random model for each real tokenizer is served by vLLM on CPU; each family's template is sent with the request
(``--trust-request-chat-template``). What vLLM reported, or refused, is kept in ``conformance.json``; the table in
``docs/counting.md`` is made from it, and a test of the normal suite counts the same requests again without vLLM.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import httpx2
import real_chats
from conformance_count import Recount
from conformance_requests import Body, columns
from conformance_table import RESULTS, read_results, totals, write
from families.catalogue import FAMILIES, MODELS, Family, Model
from families.models import model_folder
from families.packages import CannotFetch
from families.templates import template_file
from vllm_server import ServerFailed, VllmServer

PORT = 18620
REAL_CHATS = ("Qwen 3", "Llama 3.1")
WINDOW_TOKENS = 32768
FLAGS = (
    *("--load-format", "dummy", "--enforce-eager", "--max-num-seqs", "4", "--max-model-len", str(WINDOW_TOKENS)),
    *("--trust-request-chat-template", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
)


def main() -> int:
    """Measure the families asked for and print every difference; the exit status says whether there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="models by name, with commas between; the results of others are kept")
    parser.add_argument("--port", type=int, default=PORT, help="of the vLLM server")
    parser.add_argument("--recount", action="store_true", help="ask no vLLM: hold our counts against what was recorded")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(MODELS)
    for name in names if not options.recount else ():
        try:
            keep(measure(MODELS[name], options.port))
        except (CannotFetch, ServerFailed) as error:
            print(f"{name}: not measured: {error}", flush=True)
    return report(names)


def keep(record: dict[str, Any], part: str = "models") -> None:
    """Write what was measured into the file, families in their order."""
    results = read_results()
    order = [family.name for family in FAMILIES]
    merged = results.get(part, {}) | record
    results[part] = dict(sorted(merged.items(), key=lambda item: order.index(item[0])))
    text = json.dumps(results, ensure_ascii=False, indent=1)
    text = re.sub(r"\[[^][{}]*\]", lambda found: " ".join(found[0].split()), text)  # a list of numbers is one line
    RESULTS.write_text(text + "\n", encoding="utf-8")


def measure(model: Model, port: int) -> dict[str, Any]:
    """Answers of one tiny model to all requests of all families it carries: family to its record."""
    families = [family for family in FAMILIES if family.model == model.name]
    record = {}
    with serving(model, port) as client:
        for family in families:
            started = time.monotonic()
            record[family.name] = {
                "date": datetime.now(UTC).strftime("%Y-%m-%d"),
                "vllm": client.get("/version").json()["version"],
                "usage": {
                    name: [ask(client, each, family) for each in bodies] for name, bodies in columns(family.kwargs)
                },
            }
            print(f"{family.name}: asked in {time.monotonic() - started:.1f} s", flush=True)
            if family.name in REAL_CHATS:
                keep({family.name: measure_real_chats(client, family)}, "real chats")
                print(f"{family.name}: real chats asked, {time.monotonic() - started:.1f} s", flush=True)
    return record


def measure_real_chats(client: httpx2.Client, family: Family) -> list[int | str]:
    """Answers to all requests of tau-bench's chats."""
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda body: ask(client, body, family), real_chats.requests()))


@contextmanager
def serving(model: Model, port: int) -> Iterator[httpx2.Client]:
    """A vLLM server with ``model``, and a client for it."""
    server = VllmServer(f"conformance-{model.name}", model_folder(model), port, "m", (*FLAGS, *model.flags))
    started = time.monotonic()
    try:
        server.start()
        server.wait_ready()
        print(f"{model.name}: ready after {time.monotonic() - started:.0f} s", flush=True)
        with httpx2.Client(base_url=server.url, timeout=120, trust_env=False) as client:
            yield client
    finally:
        server.stop()


def ask(client: httpx2.Client, body: Body, family: Family) -> int | str:
    """``usage.prompt_tokens``, or what vLLM says instead."""
    sent = {"model": "m", "max_tokens": 1, **body}
    if family.template is not None:
        sent["chat_template"] = template_file(family.template).read_text(encoding="utf-8")
    answer = client.post("/v1/chat/completions", json=sent)
    document = answer.json()
    if answer.status_code == 200:
        return int(document["usage"]["prompt_tokens"])
    return f"{answer.status_code}: {' '.join(str(document['error']['message']).split())[:160]}"


def report(models: Sequence[str]) -> int:
    """Count what was recorded, print where we differ, and write the table. 1 if we differ or cannot count."""
    failed = 0
    for family in FAMILIES:
        results = read_results()
        record = results["models"].get(family.name)
        if record is None or family.model not in models:
            continue
        try:
            record["different"] = differences(family, record)
        except CannotFetch as error:
            print(f"{family.name}: not counted: {error}")
            continue
        keep({family.name: record})
        for column, found in record["different"].items():
            for place, theirs, ours in found:
                failed = 1
                print(f"{family.name} / {column} #{place}: vLLM {theirs}, we {ours}")
        print(f"{family.name}: counted", flush=True)
    write(read_results())
    counted, refused, different = totals(read_results())
    print(f"{counted} requests, {different} differ; vLLM refused {refused}")
    return failed


def differences(family: Family, record: dict[str, Any]) -> dict[str, list[tuple[int, int, int]]]:
    """Column to ``(place, vLLM's count, ours)`` of each request we count differently; ours is -1 if we cannot."""
    recount = Recount(family, record["date"])
    found: dict[str, list[tuple[int, int, int]]] = {}
    asked = [(column, bodies, record["usage"].get(column, ())) for column, bodies in columns(family.kwargs)]
    asked.append(("real chats", list(real_chats.requests()), read_results().get("real chats", {}).get(family.name, ())))
    for column, bodies, answers in asked:
        for place, (body, theirs) in enumerate(zip(bodies, answers, strict=False)):
            ours = recount.count(body)
            if isinstance(theirs, int) and ours != theirs:
                found.setdefault(column, []).append((place, theirs, ours if isinstance(ours, int) else -1))
    return found


if __name__ == "__main__":
    sys.exit(main())
