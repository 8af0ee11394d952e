"""Two drawings as one SVG: where the memory goes (stacked bars) and window against concurrency (curves)."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import log2

from gateway.planner.figures import GIB
from gateway.planner.matrix import Cell
from gateway.planner.plan import Plan
from gateway.planner.pool import blocks_for

# Okabe-Ito colours: distinguishable with any kind of colour vision.
_PARTS = (
    ("weights", "#0072B2"),
    ("activation", "#E69F00"),
    ("outside torch", "#CC79A7"),
    ("CUDA graphs", "#F0E442"),
    ("KV cache", "#009E73"),
    ("not requested", "#DDDDDD"),
)
_LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
_WIDTH, _LEFT, _BAR, _GAP, _CURVE = 960, 290, 18, 8, 340


def draw(cells: Sequence[Cell], title: str) -> str:
    """An SVG document of the planned cells; works in light and dark viewers since it paints its own ground."""
    plans = [(cell, cell.plan) for cell in cells if cell.plan is not None]
    bars_height = len(plans) * (_BAR + _GAP) + 70
    height = bars_height + _CURVE + 60 + 16 * len(plans)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="16" y="22" font-size="15" font-weight="bold">{escape(title)}</text>',
    ]
    parts += _legend(44)
    largest = max((plan.card.memory_gib for _, plan in plans), default=1.0)
    for index, (cell, plan) in enumerate(plans):
        parts += _bar(cell, plan, 62 + index * (_BAR + _GAP), largest)
    parts += _curves(plans, bars_height + 20)
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def memory_parts(plan: Plan) -> list[tuple[str, float]]:
    """GiB of each part of the card, in the order drawn; they sum to the card when everything fits."""
    extra = plan.overheads
    graphs = extra.graphs.value
    requested = plan.requested_gib.value
    kv = max(plan.kv_memory.value, 0.0)
    rest = max(plan.card.memory_gib - requested - (0 if plan.behaviour.graphs_subtracted else graphs), 0.0)
    return [
        ("weights", plan.weights.per_gpu.value),
        ("activation", extra.activation.value + extra.lora.value),
        ("outside torch", extra.non_torch.value),
        ("CUDA graphs", graphs),
        ("KV cache", kv),
        ("not requested", rest),
    ]


def concurrency_at(plan: Plan, window: int) -> float:
    """Requests of ``window`` tokens the pool holds at once."""
    blocks = plan.pool.num_blocks(int(max(plan.kv_memory.value, 0) * GIB))
    needed = sum(blocks_for(group.spec, window, plan.pool.settings) for group in plan.pool.groups)
    return blocks / max(needed, 1)


def _legend(y: int) -> list[str]:
    out: list[str] = []
    x = _LEFT
    for name, colour in _PARTS:
        out.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{colour}"/>')
        out.append(f'<text x="{x + 14}" y="{y}">{name}</text>')
        x += 34 + 7 * len(name)
    return out


def _bar(cell: Cell, plan: Plan, y: int, largest: float) -> list[str]:
    scale = (_WIDTH - _LEFT - 90) / largest
    label = f"{cell.model.split('/')[-1]} · {cell.kv_dtype}"
    out = [f'<text x="{_LEFT - 8}" y="{y + 13}" text-anchor="end">{escape(label[:44])}</text>']
    colours = dict(_PARTS)
    x = float(_LEFT)
    for name, gib in memory_parts(plan):
        width = gib * scale
        if width <= 0:
            continue
        out.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{colours[name]}">'
            f"<title>{name}: {gib:.2f} GiB</title></rect>"
        )
        x += width
    edge = _LEFT + plan.card.memory_gib * scale
    out.append(f'<line x1="{edge:.1f}" y1="{y - 2}" x2="{edge:.1f}" y2="{y + _BAR + 2}" stroke="#000"/>')
    out.append(f'<text x="{max(edge, x) + 6:.1f}" y="{y + 13}">{plan.card.memory_gib:.1f} GiB</text>')
    return out


def _curves(plans: Sequence[tuple[Cell, Plan]], top: int) -> list[str]:
    left, right, bottom = 70, _WIDTH - 30, top + _CURVE - 30
    out = [
        f'<text x="16" y="{top}" font-size="13" font-weight="bold">Window against concurrency '
        "(requests of that length held at once)</text>",
        f'<rect x="{left}" y="{top + 12}" width="{right - left}" height="{bottom - top - 12}" fill="none" '
        f'stroke="#888"/>',
    ]
    low, high = 10.0, 18.0  # 1k .. 256k tokens
    for power in range(10, 19):
        x = left + (power - low) / (high - low) * (right - left)
        out.append(f'<line x1="{x:.0f}" y1="{top + 12}" x2="{x:.0f}" y2="{bottom}" stroke="#eee"/>')
        out.append(f'<text x="{x:.0f}" y="{bottom + 15}" text-anchor="middle">{2 ** (power - 10)}k</text>')
    for power in range(0, 9, 2):
        y = bottom - power / 8 * (bottom - top - 12)
        out.append(f'<line x1="{left}" y1="{y:.0f}" x2="{right}" y2="{y:.0f}" stroke="#eee"/>')
        out.append(f'<text x="{left - 6}" y="{y + 4:.0f}" text-anchor="end">{2**power}</text>')
    for index, (cell, plan) in enumerate(plans):
        colour = _LINES[index % len(_LINES)]
        points: list[str] = []
        for step in range(33):
            window = int(2 ** (low + step / 32 * (high - low)))
            held = concurrency_at(plan, window)
            if held < 1:
                break
            x = left + step / 32 * (right - left)
            points.append(f"{x:.1f},{bottom - min(log2(held), 8) / 8 * (bottom - top - 12):.1f}")
        dash = ' stroke-dasharray="5 3"' if index >= len(_LINES) else ""
        if len(points) > 1:
            out.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        y = bottom + 34 + 16 * index
        note = "" if points else " (holds no window of 1k)"
        out.append(
            f'<line x1="{left}" y1="{y - 4}" x2="{left + 24}" y2="{y - 4}" stroke="{colour}" stroke-width="2"{dash}/>'
        )
        out.append(f'<text x="{left + 30}" y="{y}">{escape(cell.model)} · {cell.kv_dtype}{note}</text>')
    return out
