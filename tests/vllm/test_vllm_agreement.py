"""A real vLLM server and the simulated engine make the same of one load: admissions, preemptions, prefix cache hits.

The recordings of ``tests/simulator`` are made by this file, too::

    PYTHONPATH=tests/e2e .venv/bin/python tests/vllm/test_vllm_agreement.py 1 2
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_processes import free_port
from served_loads import LIMITS, conversations, record, replay_free, replay_waves, save, swapped
from vllm_server import ROOT, VllmServer

from gateway.simulator.model import default_folder, ensure_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(420)]

MODEL = "qwen3-tiny"

# Of one load played freely, what a server hits in its cache differs by a tenth from run to run on a busy machine.
FREE_TOLERANCE = 0.15


@contextlib.contextmanager
def server() -> Iterator[str]:
    """The address of a server that can be paused, with a cache of little more than one window."""
    flags = ["--load-format", "dummy", "--enforce-eager", "--max-model-len", str(LIMITS.window_tokens)]
    flags += ["--num-gpu-blocks-override", str(LIMITS.blocks), "--block-size", str(LIMITS.block_tokens)]
    flags += ["--max-num-seqs", str(LIMITS.sequences), "--max-num-batched-tokens", str(LIMITS.batched_tokens)]
    flags += ["--enable-prompt-tokens-details"]
    folder, may_pause = ensure_model(default_folder()), {"VLLM_SERVER_DEV_MODE": "1"}
    running = VllmServer("agreement", folder, free_port(), MODEL, flags, may_pause)
    running.start()
    try:
        running.wait_ready()
        yield running.url
    finally:
        running.stop()


def test_a_load_is_served_as_simulated() -> None:
    with server() as url:
        recording = asyncio.run(record(url, MODEL, conversations(seed=7, talks=12)))

    waves = replay_waves(recording)
    assert recording.waves.totals.preemptions > 0
    assert waves.totals == recording.waves.totals
    assert waves.cached_tokens == tuple(one.cached_tokens for one in recording.waves.served)
    assert swapped(recording.waves, waves)[0] == 0

    free = replay_free(recording)
    assert free.totals.queries_tokens == recording.free.totals.queries_tokens
    assert free.totals.hits_tokens == pytest.approx(recording.free.totals.hits_tokens, rel=FREE_TOLERANCE)
    wrong, pairs = swapped(recording.free, free)
    assert wrong <= 0.05 * pairs


def main() -> None:
    """Record the loads of the seeds that are given."""
    with server() as url:
        for seed in map(int, sys.argv[1:]):
            recording = asyncio.run(record(url, MODEL, conversations(seed)))
            save(recording, Path(ROOT / f"tests/simulator/recordings/served-{seed}.jsonl"))
            for name, part, again in (
                ("waves", recording.waves, replay_waves(recording)),
                ("free", recording.free, replay_free(recording)),
            ):
                print(f"{seed} {name}: {part.totals}, simulated {again.totals}, swapped {swapped(part, again)}")


if __name__ == "__main__":
    main()
