"""Two drawings as one SVG: where the memory goes (stacked bars) and window against concurrency (curves)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, log2

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
_DASHES = ("", "6 3", "2 3", "9 3 2 3")
_WIDTH, _LEFT, _BAR, _GAP, _CURVE = 960, 290, 18, 8, 340
_LOWEST_POWER, _LEGEND_COLUMN, _CHARACTER = 10, 430, 6.6
_Planned = tuple[Cell, Plan]


def draw(cells: Sequence[Cell], title: str) -> str:
    """An SVG document of the planned cells; works in light and dark viewers since it paints its own ground."""
    plans = [(cell, cell.plan) for cell in cells if cell.plan is not None]
    bars = _distinct_bars(plans)
    bars_height = len(bars) * (_BAR + _GAP) + 70
    height = bars_height + _CURVE + 70 + 16 * (-(-len(plans) // 2))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="16" y="22" font-size="15" font-weight="bold">{escape(title)}</text>',
    ]
    parts += _legend(44)
    largest = max((plan.card.memory_gib for _, plan in plans), default=1.0)
    for index, (label, plan) in enumerate(bars):
        parts += _bar(label, plan, 62 + index * (_BAR + _GAP), largest)
    parts += _curves(plans, bars_height + 20)
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _distinct_bars(plans: Sequence[_Planned]) -> list[tuple[str, Plan]]:
    """One bar a model while its KV dtypes split the card alike, which they do unless a drafter differs."""
    bars: dict[tuple[object, ...], tuple[str, Plan]] = {}
    for cell, plan in plans:
        key = (cell.model, *(round(gib, 3) for _, gib in memory_parts(plan)))
        bars.setdefault(key, (cell.model.split("/")[-1], plan))
    return list(bars.values())


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


def _bar(label: str, plan: Plan, y: int, largest: float) -> list[str]:
    scale = (_WIDTH - _LEFT - 90) / largest
    out = [f'<text x="{_LEFT - 8}" y="{y + 13}" text-anchor="end">{escape(label[:40])}</text>']
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
        if name in ("weights", "KV cache") and width > 40:
            out.append(
                f'<text x="{x + width / 2:.1f}" y="{y + 13}" text-anchor="middle" fill="#fff" font-size="11">'
                f"{gib:.1f}</text>"
            )
        x += width
    edge = _LEFT + plan.card.memory_gib * scale
    out.append(f'<line x1="{edge:.1f}" y1="{y - 2}" x2="{edge:.1f}" y2="{y + _BAR + 2}" stroke="#000"/>')
    kv = plan.kv_memory
    note = f"KV {max(kv.lowest, 0):.1f}-{max(kv.highest, 0):.1f}" if kv.lowest != kv.highest else f"KV {kv.value:.1f}"
    out.append(f'<text x="{max(edge, x) + 6:.1f}" y="{y + 13}">{note}</text>')
    return out


@dataclass(frozen=True, slots=True)
class _Frame:
    """Both axes are powers of two: tokens from 1k to ``high``, requests from 1 to ``most``."""

    left: float
    right: float
    top: float
    bottom: float
    high: int
    most: int

    def x(self, tokens: float) -> float:
        share = (log2(max(tokens, 1)) - _LOWEST_POWER) / (self.high - _LOWEST_POWER)
        return self.left + share * (self.right - self.left)

    def y(self, requests: float) -> float:
        return self.bottom - min(log2(max(requests, 1)) / self.most, 1.0) * (self.bottom - self.top)


def _curves(plans: Sequence[_Planned], top: int) -> list[str]:
    furthest = max((plan.largest_window.value for _, plan in plans), default=1)
    shortest = max((concurrency_at(plan, 1 << _LOWEST_POWER) for _, plan in plans), default=1.0)
    high = min(max(ceil(log2(max(furthest, 2))), _LOWEST_POWER + 2), 21)
    frame = _Frame(70, _WIDTH - 40, top + 12, top + _CURVE - 30, high, min(max(ceil(log2(max(shortest, 2))), 2), 12))
    out = [
        f'<text x="16" y="{top}" font-size="13" font-weight="bold">Requests held at once, by their length in tokens'
        "</text>",
        *_grid(frame),
    ]
    models = list(dict.fromkeys(cell.model for cell, _ in plans))
    dtypes = list(dict.fromkeys(cell.kv_dtype for cell, _ in plans))
    rows = -(-len(plans) // 2)
    for index, (cell, plan) in enumerate(plans):
        colour = _LINES[models.index(cell.model) % len(_LINES)]
        dash = _DASHES[dtypes.index(cell.kv_dtype) % len(_DASHES)]
        style = f'fill="none" stroke="{colour}" stroke-width="2"' + (f' stroke-dasharray="{dash}"' if dash else "")
        points = _points(plan, frame)
        if len(points) > 1:
            out.append(f'<polyline points="{" ".join(points)}" {style}/>')
        x, y = frame.left + index // rows * _LEGEND_COLUMN, frame.bottom + 52 + 16 * (index % rows)
        note = "" if points else ": no window of 1k fits"
        out.append(f'<line x1="{x:.0f}" y1="{y - 4:.0f}" x2="{x + 28:.0f}" y2="{y - 4:.0f}" {style}/>')
        label = f"{cell.model.split('/')[-1]} · {cell.kv_dtype}{note}"
        out.append(f'<text x="{x + 34:.0f}" y="{y:.0f}">{escape(label[: int(_LEGEND_COLUMN / _CHARACTER)])}</text>')
    return out


def _points(plan: Plan, frame: _Frame) -> list[str]:
    """The curve up to the largest window that starts, which the model's own window may cut off."""
    end = plan.largest_window.value
    first = 1 << _LOWEST_POWER
    if end < first:
        return []
    steps = 4 * (frame.high - _LOWEST_POWER)
    windows = [int(2 ** (_LOWEST_POWER + step / 4)) for step in range(steps + 1)]
    windows = [window for window in windows if window < end] + [int(end)]
    return [f"{frame.x(window):.1f},{frame.y(concurrency_at(plan, window)):.1f}" for window in windows]


def _grid(frame: _Frame) -> list[str]:
    out = [
        f'<rect x="{frame.left}" y="{frame.top}" width="{frame.right - frame.left}" '
        f'height="{frame.bottom - frame.top}" fill="none" stroke="#888"/>'
    ]
    for power in range(_LOWEST_POWER, frame.high + 1):
        x = frame.x(2**power)
        out.append(f'<line x1="{x:.0f}" y1="{frame.top}" x2="{x:.0f}" y2="{frame.bottom}" stroke="#eee"/>')
        label = f"{2 ** (power - 10)}k" if power < 20 else f"{2 ** (power - 20)}M"
        out.append(f'<text x="{x:.0f}" y="{frame.bottom + 15}" text-anchor="middle">{label}</text>')
    for power in range(0, frame.most + 1, 1 if frame.most < 6 else 2):
        y = frame.y(2**power)
        out.append(f'<line x1="{frame.left}" y1="{y:.0f}" x2="{frame.right}" y2="{y:.0f}" stroke="#eee"/>')
        out.append(f'<text x="{frame.left - 6}" y="{y + 4:.0f}" text-anchor="end">{2**power}</text>')
    middle = (frame.left + frame.right) / 2
    out.append(
        f'<text x="{middle:.0f}" y="{frame.bottom + 31}" text-anchor="middle" fill="#555">tokens a request</text>'
    )
    return out
