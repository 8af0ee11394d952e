"""``python -m bench.placing_real``: the same conversations on two real vLLM servers, with and without a gateway.

make .venv-vllm/.ready .venv-bench/.ready          once: vLLM for CPU, and vLLM's router
python -m bench.placing_real                        two rounds of a coding agent's conversations
python -m bench.placing_real --conversations FILE   recorded ones: OpenAI messages, .json, .jsonl, .gz, .xz
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path

from bench.placing_real import fronts
from bench.placing_real.conversations import Conversation, NoConversations, made, read
from bench.placing_real.figures import Run, failures, table
from bench.placing_real.fronts import Front
from bench.placing_real.playing import Pace, run
from bench.placing_real.servers import SHAPES, Server, empty_caches, end_token, two_servers
from bench.targets import ROOT, Missing
from tests.vllm.vllm_server import ServerFailed

LOGS = ROOT / ".cache" / "placing-real"
Opened = Callable[[tuple[Server, Server], Path], AbstractContextManager[Front]]

TARGETS: dict[str, Opened] = {
    "none, one server each": fronts.fixed,
    "none, all to the large": fronts.largest,
    **{f"vllm-router {policy}": functools.partial(fronts.router, policy=policy) for policy in fronts.ROUTER_POLICIES},
    "kvgate": functools.partial(fronts.gateway, settings=()),
}


def main(arguments: list[str] | None = None) -> int:
    """Print the table; why requests failed, and what could not be measured, go to stderr."""
    parser = argparse.ArgumentParser(prog="python -m bench.placing_real", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--conversations", type=Path, metavar="FILE", help="recorded ones in place of made ones")
    parser.add_argument("--count", type=int, default=16, help="conversations in all (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=10, help="of them at the same time (default: %(default)s)")
    parser.add_argument("--pause", type=float, default=0.5, help="mean seconds between two requests of one")
    parser.add_argument("--rounds", type=int, default=2, help="times that all is measured (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the made conversations, and of the pauses")
    parser.add_argument("--only", action="append", help="measure this target only (part of its name); repeatable")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of kvgate; repeatable"
    )
    options = parser.parse_args(arguments)
    try:
        conversations = read(options.conversations) if options.conversations else made(options.seed, options.count)
    except NoConversations as error:
        parser.error(str(error))
    targets: dict[str, Opened] = {**TARGETS, "kvgate": functools.partial(fronts.gateway, settings=options.set)}
    chosen = {name: opened for name, opened in targets.items() if _wanted(name, options.only)}
    if not chosen:
        parser.error(f"no target is named so; there are {', '.join(TARGETS)}")
    LOGS.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are ended, too
    try:
        with two_servers() as servers:
            measure(servers, conversations[: options.count], chosen, options)
    except ServerFailed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def measure(
    servers: tuple[Server, Server],
    conversations: list[Conversation],
    chosen: dict[str, Opened],
    options: argparse.Namespace,
) -> None:
    """Each target in turn, so often, with empty prefix caches; the table after each round, each request in ``LOGS``."""
    pace = Pace(clients=options.clients, pause_s=options.pause)
    runs: list[Run] = []
    for number in range(options.rounds):
        for name, opened in chosen.items():
            try:
                with opened(servers, LOGS) as front:
                    empty_caches(servers)
                    playing = run(name, front, servers, conversations, pace, end_token(), options.seed)
                    done, traces = asyncio.run(playing)
            except Missing as error:
                print(f"{name}: left out. {error}", file=sys.stderr)
                continue
            runs.append(done)
            lines = [json.dumps(asdict(trace)) for trace in traces]
            path = LOGS / f"{name.replace(' ', '-').replace(',', '')}-{number + 1}.jsonl"
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
            load = os.getloadavg()[0]
            print(f"round {number + 1}, {name}: {done.seen.wall_s:.0f} s, load {load:.1f}", file=sys.stderr, flush=True)
        shapes = " and ".join(f"{shape.window_tokens:,} tokens (cache {shape.cache_tokens:,})" for shape in SHAPES)
        print(f"\n{len(conversations)} conversations, {pace.clients} at a time; windows of {shapes}\n")
        print(table(runs), flush=True)
        print(f"\n{failures(runs)}\n", file=sys.stderr, flush=True)


def _wanted(name: str, only: list[str] | None) -> bool:
    return not only or any(part in name for part in only)


if __name__ == "__main__":
    sys.exit(main())
