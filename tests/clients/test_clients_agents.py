"""Real coding agents, headless: a task that overflows the true window three times and more runs to its end."""

from __future__ import annotations

from pathlib import Path

import pytest
from agents import AGENTS, ROOT, Ended
from conftest import Serve
from e2e_gateway import Gateway
from scripted import Script

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]

WINDOW_TOKENS = 40_000
TIMEOUT_S = 240.0

RECORDS = ROOT / ".cache" / "clients"

# Turns that overflow the window at least three times. Qwen Code cuts outputs of commands down by itself.
TURNS = {"cline": 10, "codex": 10, "opencode": 10, "qwen": 24}


@pytest.mark.parametrize("name", list(AGENTS))
def test_a_task_that_overflows_the_window_runs_to_its_end(
    name: str, scripted: Serve, node: Path, tmp_path: Path
) -> None:
    with scripted(WINDOW_TOKENS, TURNS[name]) as (gateway, script):
        ended = AGENTS[name].run(f"{gateway.url}/v1", tmp_path, TIMEOUT_S)
        record(name, gateway, script, ended)
        refused, trimmed = overflows(gateway, "refuse"), overflows(gateway, "trim")
        assert script.turn == TURNS[name]
        assert "Done. Every command has been run." in ended.output
        assert script.asked[-1].said.startswith("Done.")
        assert refused + trimmed >= 3
        assert [asked for asked in script.asked if asked.status != 200] == []


def overflows(gateway: Gateway, action: str) -> float:
    """How often an overflow was answered in this way."""
    return sum(
        sample.value
        for sample in gateway.metrics().named("kvgate_overflows_total")
        if sample.labels.get("action") == action
    )


def record(name: str, gateway: Gateway, script: Script, ended: Ended) -> None:
    """Write down what the client sent and what became of it; docs/clients.md tells of it."""
    lines = [
        f"{name}: status {ended.status} after {ended.seconds:.0f} s",
        f"refused {overflows(gateway, 'refuse'):.0f}, trimmed {overflows(gateway, 'trim'):.0f}",
        *(
            f"{asked.body_bytes:7} B {asked.prompt_tokens:6} tokens {asked.status} {asked.tools:2} tools {asked.said}"
            for asked in script.asked
        ),
    ]
    RECORDS.mkdir(parents=True, exist_ok=True)
    (RECORDS / f"{name}.txt").write_text("\n".join(lines) + "\n")
