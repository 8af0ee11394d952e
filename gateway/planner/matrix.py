"""Models × KV dtypes on one card: weights, KV memory, largest window, flags; as text, Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gateway.planner.cards import Card
from gateway.planner.errors import PlannerError
from gateway.planner.figures import Figure, gib_text, tokens_text
from gateway.planner.flags import serve_command
from gateway.planner.plan import Plan, make_plan
from gateway.planner.screen import shell_lines, wrapped
from gateway.planner.versions import Behaviour
from gateway.planner.wish import Subject, Wish

COLUMNS = ("model", "kv_dtype", "weights_gib", "kv_memory_gib", "kv_tokens", "max_window", "flags")
DEFAULT_MODELS = (
    "Qwen/Qwen2.5-32B-Instruct-AWQ",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B-AWQ",
    "Qwen/Qwen2.5-Coder-7B-Instruct",
    "Qwen/Qwen2.5-14B-Instruct-AWQ",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3.6-27B-AWQ",
    "openai/gpt-oss-20b",
    "google/gemma-3-12b-it-FP8",
)
DEFAULT_DTYPES = ("auto", "fp8")


@dataclass(frozen=True, slots=True)
class Cell:
    """One line of the matrix: a plan, or why there is none."""

    model: str
    kv_dtype: str
    plan: Plan | None
    problem: str = ""

    @property
    def window(self) -> Figure | None:
        return None if self.plan is None else self.plan.largest_window


def make_matrix(
    subjects: Sequence[tuple[str, Subject]], card: Card, wish: Wish, behaviour: Behaviour, dtypes: Sequence[str]
) -> list[Cell]:
    """Every combination, in the order given. A combination that cannot be planned says why."""
    cells: list[Cell] = []
    for name, subject in subjects:
        for dtype in dtypes:
            try:
                plan = make_plan(subject, card, replace(wish, kv_dtype=dtype), behaviour, compare=False)
            except PlannerError as error:
                cells.append(Cell(name, dtype, None, str(error)))
                continue
            problem = "" if plan.support.runs else f"not on this card: {plan.support.note}"
            if not problem and plan.largest_window.value < 1:
                problem = f"no window fits: {plan.limit}"
            cells.append(Cell(name, dtype, plan, problem))
    return cells


def as_records(cells: Sequence[Cell]) -> list[dict[str, object]]:
    """One flat record a cell, with the columns' names; figures keep their range."""
    records: list[dict[str, object]] = []
    for cell in cells:
        record: dict[str, object] = {"model": cell.model, "kv_dtype": cell.kv_dtype, "problem": cell.problem}
        if cell.plan is not None:
            plan = cell.plan
            record |= {
                "weights_gib": plan.weights.per_gpu.as_json(),
                "kv_memory_gib": plan.kv_memory.as_json(),
                "kv_bytes_per_token": plan.kv_bytes_per_token.as_json(1),
                "kv_tokens": plan.size_tokens.as_json(0),
                "max_window": plan.largest_window.as_json(0),
                "limited_by": plan.limit,
                "flags": serve_command(plan),
            }
        records.append(record)
    return records


def as_markdown(cells: Sequence[Cell]) -> str:
    """A table for a page."""
    lines = [
        "| Model | KV dtype | Weights | KV memory | KV tokens | Largest window | Command |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for cell in cells:
        if cell.plan is None:
            lines.append(f"| {cell.model} | {cell.kv_dtype} | | | | | {cell.problem} |")
            continue
        command = cell.problem or f"`{serve_command(cell.plan)}`"
        lines.append(
            f"| {cell.model} | {cell.kv_dtype} | {_gib_range(cell.plan.weights.per_gpu)} | "
            f"{_gib_range(cell.plan.kv_memory)} | {tokens_text(cell.plan.size_tokens.value)} | "
            f"{_token_range(cell.plan.largest_window)} | {command} |"
        )
    return "\n".join(lines) + "\n"


def as_csv(cells: Sequence[Cell]) -> str:
    """Plain columns for a spreadsheet; ranges as ``_low`` and ``_high``."""
    names: list[str] = []
    for column in COLUMNS:
        names += [column, f"{column}_low", f"{column}_high"] if column in ("kv_memory_gib", "max_window") else [column]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*names, "problem"])
    for cell in cells:
        plan = cell.plan
        if plan is None:
            writer.writerow([cell.model, cell.kv_dtype, *[""] * (len(names) - 2), cell.problem])
            continue
        kv, window = plan.kv_memory, plan.largest_window
        writer.writerow(
            [
                cell.model,
                cell.kv_dtype,
                round(plan.weights.per_gpu.value, 2),
                *(round(number, 2) for number in (kv.value, kv.lowest, kv.highest)),
                int(plan.size_tokens.value),
                *(int(number) for number in (window.value, window.lowest, window.highest)),
                serve_command(plan),
                cell.problem,
            ]
        )
    return out.getvalue()


def as_text(cells: Sequence[Cell], card: Card, behaviour: Behaviour, width: int = 100) -> str:
    """The table for a terminal; narrow ones lose columns, and long model names their end."""
    heads = ("weights", "KV memory", "KV tokens", "largest window")
    widths = (9, 12, 12, 17) if width >= 92 else (8, 0, 0, 16) if width < 72 else (8, 11, 0, 16)
    dtypes = max((len(cell.kv_dtype) for cell in cells), default=4) + 1
    names = min(max((len(_short(cell)) for cell in cells), default=5), width - sum(widths) - dtypes - 2)
    lines = [
        wrapped(
            f"{card.name} ({gib_text(card.memory_gib)} visible), vLLM {behaviour.text}; GiB and tokens, ranges are "
            "estimates",
            width,
        ),
        "",
        f"{'model':<{names}}  {'KV':<{dtypes}}" + _columns(heads, widths),
    ]
    for cell in cells:
        start = f"{_short(cell)[:names]:<{names}}  {cell.kv_dtype:<{dtypes}}"
        if cell.plan is None:
            lines.append(wrapped(cell.problem, width, start, " " * len(start)))
            continue
        plan = cell.plan
        figures = (
            f"{plan.weights.per_gpu.value:.2f}",
            _gib_range(plan.kv_memory),
            tokens_text(plan.size_tokens.value),
            _token_range(plan.largest_window),
        )
        lines.append(start + _columns(figures, widths))
        if cell.problem:
            lines.append(wrapped(cell.problem, width, "    ", "    "))
    lines += ["", "Commands"]
    lines += [shell_lines(serve_command(cell.plan), width) for cell in cells if cell.plan and not cell.problem]
    return "\n".join(lines)


def _short(cell: Cell) -> str:
    return cell.model.rstrip("/").rsplit("/", 1)[-1]


def _columns(texts: Sequence[str], widths: Sequence[int]) -> str:
    return "".join(f"{text:>{width}}" for text, width in zip(texts, widths, strict=True) if width)


def _gib_range(figure: Figure) -> str:
    if figure.lowest == figure.highest:
        return f"{figure.value:.2f}"
    return f"{max(figure.lowest, 0):.1f}-{max(figure.highest, 0):.1f}"


def _token_range(figure: Figure) -> str:
    if figure.lowest == figure.highest:
        return tokens_text(figure.value)
    return f"{tokens_text(figure.lowest)}-{tokens_text(figure.highest)}"
