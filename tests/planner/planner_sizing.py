"""The true side of the matrix in docs/sizing.md: ``python tests/planner/planner_sizing.py`` writes it there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gateway.planner.cards import find_card
from gateway.planner.figures import Figure
from gateway.planner.plan import Plan, make_plan
from gateway.planner.source import load_subject
from gateway.planner.versions import behaviour_of
from gateway.planner.wish import Wish

PAGE = Path(__file__).parents[2] / "docs" / "sizing.md"
START, END = "<!-- matrix -->\n", "\n<!-- /matrix -->"
CARD = find_card("RTX 4090")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the copied table, and what is to be said about it."""

    title: str
    model: str
    per_token: str
    copied: str
    verdict: str
    tp: int = 1


ROWS = (
    Row("Qwen2.5-32B AWQ", "Qwen/Qwen2.5-32B-Instruct-AWQ", "256 KiB", "16,384 / 32,768",
        "wrong at defaults, just reachable tuned"),
    Row("DeepSeek-R1-Distill-Qwen-32B AWQ", "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B-AWQ", "256 KiB",
        "16,384 / 32,768", "the same geometry, the same verdict"),
    Row("Qwen2.5-Coder-7B fp16", "Qwen/Qwen2.5-Coder-7B-Instruct", "56 KiB", "65,536 / 131,072",
        "right, even modest; but needs YaRN above 32,768"),
    Row("Qwen2.5-14B AWQ", "Qwen/Qwen2.5-14B-Instruct-AWQ", "192 KiB", "65,536 / 131,072",
        "5-30 % too much at defaults; YaRN"),
    Row("Llama-3.3-70B AWQ, two cards", "meta-llama/Llama-3.3-70B-Instruct-AWQ", "160 KiB a card", "- / 65,536",
        "wrong", 2),
)  # fmt: skip


def plan(row: Row, kv_dtype: str, *, tuned: bool) -> Plan:
    """The plan of one cell."""
    wish = Wish(tp=row.tp, kv_dtype=kv_dtype)
    if tuned:
        wish = Wish(tp=row.tp, kv_dtype=kv_dtype, eager=True, utilization=0.95, seqs=16)
    return make_plan(load_subject(row.model, offline=True), CARD, wish, behaviour_of(None), compare=False)


def table() -> str:
    """The matrix as Markdown."""
    lines = [
        "| Model | KV per token, fp16 | Copied: fp16 / fp8 | Default: fp16 | Default: fp8 | Tuned: fp16 | Tuned: fp8 "
        "| Verdict |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for row in ROWS:
        cells = [
            _range(plan(row, kv_dtype, tuned=tuned).size_tokens)
            for tuned in (False, True)
            for kv_dtype in ("auto", "fp8")
        ]
        lines.append(f"| {row.title} | {row.per_token} | {row.copied} | {' | '.join(cells)} | {row.verdict} |")
    return "\n".join(lines)


def _range(figure: Figure) -> str:
    low, high = (round(number, -2) for number in (figure.lowest, figure.highest))
    return f"{int(low):,} - {int(high):,}"


if __name__ == "__main__":
    before, rest = PAGE.read_text(encoding="utf-8").split(START)
    PAGE.write_text(before + START + table() + END + rest.split(END, 1)[1], encoding="utf-8")
