"""``python -m bench.relay``: what relaying costs - nginx, the gateway and vLLM's router side by side in one run.

The number to look at is CPU per request and per chunk: it is the processes' own and moves little when the machine is
busy with other things. Wall-clock figures are printed beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from bench.bodies import local_count
from bench.load import LoadError
from bench.report import document, summarised, table
from bench.scenarios import FULL, QUICK, Scenarios
from bench.targets import Bench, Missing, Target

NAMES = ("direct", "nginx", "vllm-router", "gateway", "gateway, no tokenizer")


def say(text: str) -> None:
    """To the person who waits; results alone go to standard output."""
    print(text, file=sys.stderr, flush=True)


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command's flags."""
    parser = argparse.ArgumentParser(prog="python -m bench.relay", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round of less; under a minute")
    parser.add_argument("--json", action="store_true", help="print every sample as JSON instead of the table")
    parser.add_argument("--rounds", type=int, help="repeats of everything, however long they take")
    parser.add_argument("--step-ms", type=float, default=5.0, help="between two chunks of a stream")
    parser.add_argument("--tokenizer", type=Path, help="folder of another tokenizer with a chat template")
    options = parser.parse_args(arguments)
    if options.rounds is not None and options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


async def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start everything, measure, stop everything. Raises ``LoadError`` when a target answers wrongly."""
    plan = QUICK if options.quick else FULL
    scenarios = Scenarios(plan, local_count(str(folder)))
    began_s = time.monotonic()
    missing: list[str] = []
    with Bench(folder, options.step_ms) as bench:
        probe = scenarios.probe
        starts: dict[str, Callable[[], Awaitable[Target]]] = {
            "direct": lambda: bench.direct(probe),
            "nginx": lambda: bench.nginx(probe),
            "vllm-router": lambda: bench.router(probe),
            "gateway": lambda: bench.gateway(probe, tokenizer=True),
            "gateway, no tokenizer": lambda: bench.gateway(probe, tokenizer=False),
        }
        targets: list[Target] = []
        for name in NAMES:
            try:
                targets.append(await starts[name]())
                say(f"bench: {name} is up")
            except Missing as error:
                missing.append(str(error))
                say(f"bench: without {name}: {error}")
        rounds = options.rounds or plan.rounds
        await scenarios.memory_at_first(targets)
        done, longest_s = 0, 0.0
        while done < rounds:
            so_far_s = time.monotonic() - began_s
            if options.rounds is None and done and so_far_s + longest_s > plan.limit_s:
                say(f"bench: the machine is busy; {done} of {rounds} rounds must do")
                break
            say(f"bench: round {done + 1} of {rounds} ({so_far_s:.0f} s so far)")
            await scenarios.round(targets)
            done += 1
            longest_s = max(longest_s, time.monotonic() - began_s - so_far_s)
        scenarios.memory_at_last(targets)
    samples = scenarios.samples
    facts = {
        "machine": f"{platform.platform()}, {os.cpu_count()} CPUs, Python {platform.python_version()}",
        "load_average": os.getloadavg()[0],
        "seconds": round(time.monotonic() - began_s, 1),
        "rounds": done,
        "step_ms": options.step_ms,
        "bodies": samples.shapes,
        "targets": [target.name for target in targets],
        "missing": missing,
    }
    return document(rows := summarised(samples.values), samples.values, facts) | {"rows": rows}


def main(arguments: list[str] | None = None) -> int:
    """The command: 0, or 1 when a target answered wrongly, since then there is no number to print."""
    options = read_options(arguments)
    import uvloop

    from gateway.exceptions import GatewayError
    from gateway.simulator.model import default_folder, ensure_model

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 8192)), hard))
    try:
        folder = options.tokenizer.resolve() if options.tokenizer else ensure_model(default_folder())
        result = uvloop.run(run(options, folder))
    except (LoadError, GatewayError, TimeoutError) as error:
        say(f"bench: {error or type(error).__name__}")
        return 1
    except BaseExceptionGroup as group:
        say(f"bench: {group.exceptions[0]}")
        return 1
    except KeyboardInterrupt:
        return 130
    rows = result.pop("rows")
    if options.json:
        print(json.dumps(result, indent=2))
        return 0
    print(f"{result['machine']}; load {result['load_average']:.1f}; {result['rounds']} round(s), {result['seconds']} s")
    print(
        f"medians [least..most]; a 60k turn: {result['bodies']['60k']}; a chunk every {result['step_ms']:g} ms a stream"
    )
    print(table(rows, result["targets"]))
    for line in result["missing"]:
        print(f"not measured: {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
