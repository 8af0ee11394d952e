"""``python -m bench.placing``: the same traffic under every policy, one table for each scenario and load level."""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from bench.placing import tables
from bench.placing.jobs import PLACERS, Done, Job, play
from bench.placing.replay import by_characters, by_tokenizer, conversations
from bench.placing.scenarios import NAMES, scenario


def main() -> None:
    """Run the laboratory."""
    parser = argparse.ArgumentParser(prog="python -m bench.placing", description=__doc__)
    parser.add_argument(
        "--scenario", nargs="+", choices=NAMES, default=["uniform"], help="see bench/placing/scenarios.py"
    )
    parser.add_argument("--load", type=float, nargs="+", default=[1.0, 2.0, 3.0], help="load levels")
    parser.add_argument("--policy", nargs="+", choices=PLACERS, default=list(PLACERS))
    parser.add_argument("--backends", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--window", type=int, default=32768, help="tokens; not of scenarios with windows of their own")
    parser.add_argument("--cache", type=int, default=131072, help="KV tokens of a backend, likewise")
    parser.add_argument(
        "--conversations", type=Path, help="recorded conversations to replay, too (bench/placing/replay.py)"
    )
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json for them; otherwise four characters are a token")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--markdown", action="store_true", help="print tables for a document")
    parser.add_argument("--json", type=Path, help="write every figure to this file, too")
    options = parser.parse_args()
    encode = by_tokenizer(options.tokenizer) if options.tokenizer else by_characters
    recorded = conversations(options.conversations, encode) if options.conversations else ()
    groups: list[list[Job]] = []
    for name in options.scenario:
        for level in options.load:
            found = scenario(
                name, level, options.minutes * 60, options.backends, options.window, options.cache, recorded
            )
            jobs = [Job(found, level, policy, options.seed) for policy in options.policy]
            if found.load.flood:
                jobs += [Job(found, level, policy, options.seed, calm=True) for policy in options.policy]
            groups.append(jobs)
    written: list[dict[str, object]] = []
    for jobs, results in zip(groups, _grouped(groups, options.jobs), strict=True):
        _show(jobs[0], results, options.minutes, options.backends, markdown=options.markdown)
        written.extend(_written(item) for item in results)
    if options.json:
        options.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def _grouped(groups: list[list[Job]], processes: int) -> Iterator[list[Done]]:
    """The results group by group, as soon as each is complete."""
    jobs = [job for group in groups for job in group]
    if processes == 1:
        results: Iterator[Done] = map(play, jobs)
        for group in groups:
            yield [next(results) for _ in group]
        return
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=4) as pool:
        results = iter(pool.imap(play, jobs))
        for group in groups:
            yield [next(results) for _ in group]


def _show(first: Job, results: list[Done], minutes: float, backends: int, *, markdown: bool) -> None:
    found = [item.figures for item in results if not item.job.calm]
    calm = [item.figures for item in results if item.job.calm]
    mark = "### " if markdown else ""
    took = ", ".join(f"{item.figures.policy} {item.cpu_s:.1f}" for item in results)
    print(f"\n{mark}{first.scenario.name}, load {first.level:g}: {backends} backends, {minutes:g} minutes\n")
    print(tables.rows(found, markdown=markdown))
    print()
    print(tables.by_kind(found, markdown=markdown))
    if calm:
        print()
        print(tables.flooded(found, calm, markdown=markdown))
    goals = tables.verdict(found)
    if goals:
        print()
        print(tables.verdict_table(goals, markdown=markdown))
    if not markdown:
        print(f"\ns of CPU: {took}", flush=True)


def _written(item: Done) -> dict[str, object]:
    job = item.job
    return {
        "scenario": job.scenario.name,
        "load": job.level,
        "calm": job.calm,
        "seed": job.seed,
        "cpu_s": round(item.cpu_s, 2),
        **asdict(item.figures),
    }


if __name__ == "__main__":
    main()
