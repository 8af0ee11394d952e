"""The conformance table of ``docs/counting.md``, made from ``conformance.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("conformance.json")
PAGE = ROOT / "docs" / "counting.md"
BEGIN, END = "<!-- conformance: written by make conformance -->", "<!-- end of conformance -->"

SHORT = {
    "multi-turn": "turns",
    "parallel calls": "par. calls",
    "content null": "null",
    "content parts": "parts",
    "tool results": "results",
    "continue final": "cont.",
    "no generation prompt": "no gen.",
    "20k-token code": "20k code",
}


def read_results() -> dict[str, Any]:
    """What was measured before."""
    if RESULTS.is_file():
        found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
        return found
    return {"models": {}}


def table(results: Mapping[str, Any]) -> str:
    """Rows of families, columns of requests; each cell the largest difference between our counts and vLLM's."""
    records: Mapping[str, Any] = results["models"]
    columns = list(dict.fromkeys(column for record in records.values() for column in record["usage"]))
    lines = [
        "| | " + " | ".join(SHORT.get(column, column) for column in columns) + " |",
        "|---|" + "---|" * len(columns),
    ]
    for family, record in records.items():
        lines.append(f"| {family} | " + " | ".join(_cell(record, column) for column in columns) + " |")
    return "\n".join(lines)


def totals(results: Mapping[str, Any]) -> tuple[int, int, int]:
    """Requests that vLLM counted, that it refused, and that we count differently."""
    answers = [answer for record in results["models"].values() for cell in record["usage"].values() for answer in cell]
    counted = sum(isinstance(answer, int) for answer in answers)
    different = sum(sum(map(len, record.get("different", {}).values())) for record in results["models"].values())
    return counted, len(answers) - counted, different


def block(results: Mapping[str, Any]) -> str:
    """The part of the page that is written anew."""
    counted, refused, different = totals(results)
    versions = " and ".join(sorted({record["vllm"] for record in results["models"].values()}))
    summary = (
        f"vLLM {versions}: {counted:,} requests counted by both, {different} of them differently; "
        f"{refused} were refused by vLLM."
    )
    real = results.get("real chats", {})
    if real:
        requests = min(len(answers) for answers in real.values())
        summary += (
            f" Of the {requests:,} requests of tau-bench's real airline chats (gpt-4o, MIT) {_real(results)} with the "
            f"templates of {' and '.join(real)}."
        )
    return f"{BEGIN}\n{summary}\n\n{table(results)}\n{END}"


def _real(results: Mapping[str, Any]) -> str:
    wrong = sum(len(record.get("different", {}).get("real chats", ())) for record in results["models"].values())
    return f"{wrong} differ" if wrong else "none differs"


def write(results: Mapping[str, Any]) -> None:
    """Put the table into the page."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(before + block(results) + after, encoding="utf-8")


def _cell(record: Mapping[str, Any], column: str) -> str:
    answers = record["usage"].get(column)
    if answers is None:
        return ""
    refused = sum(not isinstance(answer, int) for answer in answers)
    if refused == len(answers):
        return "–"
    differences = [ours - theirs for place, theirs, ours in record.get("different", {}).get(column, ())]
    largest = max(differences, key=abs, default=0)
    return f"{largest:+d}" if largest else f"0·{refused}" if refused else "0"
