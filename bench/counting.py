"""What counting costs: ``python -m bench.counting``. A coding agent's conversation grows from 2,000 to 60,000 tokens.

Measured from a request's bytes to its ``Count``, through the same calls as the gateway's, beside Hugging Face's full
render and encode of the same requests and a backend's ``/tokenize``. Every count is held against Hugging Face's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx2

from bench.agent import Conversation, agent_conversation
from bench.counting_phases import measure_phases, phases
from gateway.api import body as bodies
from gateway.api import chat
from gateway.config import CountingSettings
from gateway.exceptions import GatewayError
from gateway.simulator.model import default_folder, ensure_model
from gateway.tokens.local import LocalCounter
from gateway.tokens.service import Counter, ServedModel

TURNS = 40
GROWTH_BYTES = 6_000
# The last turns, from about 50,000 tokens on, stand for "60k".
LARGE_TURNS = 8
MODEL = "m"


@dataclass(frozen=True, slots=True)
class Figures:
    """Milliseconds of one thing measured: wall time, and CPU time of the process (all threads).

    On a machine with other work only the least tell what it costs; the others tell what the machine was like.
    """

    wall_least_ms: float
    cpu_least_ms: float
    wall_p50_ms: float
    wall_p99_ms: float
    cpu_p50_ms: float
    cpu_p99_ms: float
    samples: int


def figures(samples: Sequence[tuple[float, float]]) -> Figures:
    """From ``(wall, CPU)`` in seconds."""
    wall, cpu = (sorted(1000 * each[place] for each in samples) for place in (0, 1))
    return Figures(
        wall[0], cpu[0], statistics.median(wall), _p99(wall), statistics.median(cpu), _p99(cpu), len(samples)
    )


def _p99(ordered: Sequence[float]) -> float:
    return ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))]


async def measure_growth(
    counter: Counter, served: ServedModel, conversations: Sequence[Conversation]
) -> tuple[dict[str, list[tuple[float, float]]], dict[tuple[int, int], int]]:
    """Seconds of every turn of every conversation, by kind, and the counts. Conversations grow side by side."""
    samples: dict[str, list[tuple[float, float]]] = {"all turns": [], "large turns": [], "large, after a question": []}
    counts: dict[tuple[int, int], int] = {}
    for turn in range(TURNS):
        for number, conversation in enumerate(conversations):
            body = conversation.body(turn, MODEL)
            counts[number, turn], taken = await _count(counter, served, body)
            large = turn >= TURNS - LARGE_TURNS
            asked = conversation.messages[conversation.ends[turn] - 1]["role"] == "user"
            if turn:
                samples["all turns"].append(taken)
            if large:
                samples["large, after a question" if asked else "large turns"].append(taken)
    return samples, counts


async def _count(counter: Counter, served: ServedModel, body: bytes) -> tuple[int, tuple[float, float]]:
    wall, cpu = time.perf_counter(), time.process_time()
    count = await counter.count(chat.parse(body, "application/json"), served)
    taken = time.perf_counter() - wall, time.process_time() - cpu
    if count.source != "local":
        raise SystemExit(f"counted by {count.source}, not locally")
    return count.total_tokens, taken


async def measure_cold(counter: Counter, served: ServedModel, seeds: Sequence[int]) -> list[tuple[float, float]]:
    """Seconds of the large last turn of conversations that were never seen."""
    samples = []
    for seed in seeds:
        body = agent_conversation(seed, TURNS, GROWTH_BYTES).body(TURNS - 1, MODEL)
        samples.append((await _count(counter, served, body))[1])
    return samples


async def measure_gap(counter: Counter, served: ServedModel, conversations: Sequence[Conversation]) -> dict[str, float]:
    """The longest times in ms that one callback held the event loop while 8 clients counted.

    Wall time holds the waiting for other processes and the GIL, CPU time is what the loop's own thread worked.
    """
    longest = [0.0, 0.0]
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        wall, cpu = time.perf_counter(), time.thread_time()
        run(handle)
        longest[:] = max(longest[0], time.perf_counter() - wall), max(longest[1], time.thread_time() - cpu)

    async def client(bodies: Sequence[bytes]) -> None:
        for body in bodies:
            await counter.count(chat.parse(body, "application/json"), served)
            await asyncio.sleep(0.005)

    async def under(work: Awaitable[Any], name: str) -> dict[str, float]:
        longest[:] = 0.0, 0.0
        await work
        return {f"longest hold, {name}, wall ms": 1000 * longest[0], f"longest hold, {name}, CPU ms": 1000 * longest[1]}

    warm = [[each.body(turn, MODEL) for turn in range(TURNS - LARGE_TURNS, TURNS - 1)] for each in conversations]
    await asyncio.gather(*(client(load[:1]) for load in warm))
    cold = [[agent_conversation(9000 + n, TURNS, GROWTH_BYTES).body(TURNS - 1, MODEL)] for n in range(8)]
    asyncio.Handle._run = timed  # type: ignore[method-assign]
    try:
        return {
            **await under(asyncio.gather(*(client(load[1:]) for load in warm)), "warm"),
            **await under(asyncio.gather(*map(client, cold)), "cold"),
        }
    finally:
        asyncio.Handle._run = run  # type: ignore[method-assign]


def phases_by_kind(local: LocalCounter, quick: bool) -> dict[str, Any]:
    """CPU of each phase, of turns that grew by tool results and of last turns never seen."""
    cold = [agent_conversation(300 + n, TURNS, GROWTH_BYTES).body(TURNS - 1, MODEL) for n in range(4 if quick else 20)]
    warm = []
    for seed in range(400, 402 if quick else 408):
        one = agent_conversation(seed, TURNS, GROWTH_BYTES)
        turns = [
            turn for turn in range(TURNS - LARGE_TURNS, TURNS) if one.messages[one.ends[turn] - 1]["role"] == "tool"
        ]
        warm += measure_phases(local, (one.body(turn, MODEL) for turn in turns), unmeasured=1)
    by_kind = {"warm, large turns": warm, "cold, last turn": measure_phases(local, cold)}
    return {kind: {name: asdict(each) for name, each in phases(of).items()} for kind, of in by_kind.items()}


def measure_reference(
    folder: Path, conversations: Sequence[Conversation], counts: dict[tuple[int, int], int]
) -> tuple[list[tuple[float, float]], int]:
    """Hugging Face's render and encode of the large turns, and how many of our counts it contradicts."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    samples, wrong = [], 0
    for number, conversation in enumerate(conversations[:2]):
        for turn in (1, 7, TURNS // 2, *range(TURNS - LARGE_TURNS, TURNS)):
            body = conversation.body(turn, MODEL)
            wall, cpu = time.perf_counter(), time.process_time()
            document = json.loads(body)
            for message in document["messages"]:
                message["content"] = message.get("content") or ""
                for call in message.get("tool_calls", ()):
                    call["function"]["arguments"] = json.loads(call["function"]["arguments"])
            text = tokenizer.apply_chat_template(
                document["messages"], tools=document["tools"], add_generation_prompt=True, tokenize=False
            )
            tokens = len(tokenizer.encode(text, add_special_tokens=False))
            if turn >= TURNS - LARGE_TURNS:
                samples.append((time.perf_counter() - wall, time.process_time() - cpu))
            wrong += tokens != counts[number, turn]
    return samples, wrong


async def measure_backend(url: str, conversations: Sequence[Conversation]) -> tuple[str, list[tuple[float, float]]]:
    """Asking a backend's ``/tokenize`` for the large turns, as far as its window lets it answer."""
    samples = []
    async with httpx2.AsyncClient(timeout=60) as client:
        card = (await client.get(f"{url}/v1/models")).json()["data"][0]
        for conversation in conversations[:2]:
            for turn in range(TURNS - LARGE_TURNS, TURNS):
                document = json.loads(conversation.body(turn, card["id"]))
                asked = {name: document[name] for name in ("model", "messages", "tools")}
                wall, cpu = time.perf_counter(), time.process_time()
                answer = await client.post(f"{url}/tokenize", json=asked)
                samples.append((time.perf_counter() - wall, time.process_time() - cpu))
                answer.raise_for_status()
                answer.json()
    return str(card["id"]), samples


async def run(backend: str | None, quick: bool) -> dict[str, Any]:
    """Measure everything; returns what ``--json`` prints."""
    folder = ensure_model(default_folder())

    async def no_backend(*_: Any) -> Any:
        raise OSError("the bench counts locally")

    counter = Counter(CountingSettings(), {}, no_backend)
    served = ServedModel(MODEL, str(folder))
    try:
        note = await counter.warm(served)
        await _count(counter, served, agent_conversation(99, TURNS, GROWTH_BYTES).body(TURNS - 1, MODEL))
        conversations = [agent_conversation(seed, TURNS, GROWTH_BYTES) for seed in range(2 if quick else 8)]
        before = _resident_bytes()
        samples, counts = await measure_growth(counter, served, conversations)
        grown = _resident_bytes() - before
        kept_by_eight = counter.kept_bytes()["conversations"]
        cold = await measure_cold(counter, served, range(100, 104 if quick else 120))
        gaps = await measure_gap(counter, served, conversations)
        kept_bytes = counter.kept_bytes() | {"bodies": bodies.kept_bytes()}
        reference, wrong = measure_reference(folder, conversations, counts)
        result: dict[str, Any] = {
            "counted": note,
            "tokens": [min(counts.values()), max(counts.values())],
            "turns": len(counts),
            "counts that differ from transformers": wrong,
            "ms": {f"warm, {name}": asdict(figures(each)) for name, each in samples.items() if each},
            **gaps,
            "kept, MB (about)": {name: round(size / 1e6, 1) for name, size in kept_bytes.items()},
            "kept of the growing conversations alone, MB (about)": kept_by_eight / 1e6,
            "memory grown by the conversations, MB": grown / 1e6,
            "load": os.getloadavg()[0],
        }
        local = counter.local(served)
        assert local is not None
        result["CPU ms by phase"] = phases_by_kind(local, quick)
        result["ms"]["cold, last turn"] = asdict(figures(cold))
        result["ms"]["transformers, large turns"] = asdict(figures(reference))
        if backend is not None:
            name, asked = await measure_backend(backend.rstrip("/"), conversations)
            result["ms"][f"/tokenize of {name}, large turns"] = asdict(figures(asked))
        return result
    finally:
        counter.close()


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def tables(measured: dict[str, dict[str, float]], by_phase: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    """The figures as Markdown, for docs/benchmarks.md."""
    columns = ("wall_least_ms", "wall_p50_ms", "wall_p99_ms", "cpu_least_ms", "cpu_p50_ms", "cpu_p99_ms", "samples")
    lines = [
        "| ms | wall, least | wall p50 | wall p99 | CPU, least | CPU p50 | CPU p99 | samples |",
        "|---|" + 7 * "---|",
    ]
    lines += [
        f"| {name} | {' | '.join(f'{each[column]:.4g}' for column in columns)} |" for name, each in measured.items()
    ]
    for kind, of in by_phase.items():
        lines += ["", f"| CPU ms, {kind} | least | p50 |", "|---|---|---|"]
        lines += [f"| {name} | {each['least_ms']:.2f} | {each['p50_ms']:.2f} |" for name, each in of.items()]
    return [*lines, ""]


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="python -m bench.counting", description=__doc__)
    parser.add_argument("--backend", help="base URL of a vLLM server (or simulator) whose /tokenize is measured too")
    parser.add_argument("--quick", action="store_true", help="two conversations instead of eight")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    try:
        result = asyncio.run(run(arguments.backend, arguments.quick))
    except (GatewayError, httpx2.HTTPError) as error:
        sys.exit(f"bench.counting: {error}")
    if arguments.json:
        print(json.dumps(result, indent=1))
        return
    print("\n".join(tables(result.pop("ms"), result.pop("CPU ms by phase"))))
    for name, value in result.items():
        print(f"{name}: {round(value, 2) if isinstance(value, float) else value}")


if __name__ == "__main__":
    main()
