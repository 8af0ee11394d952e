"""Where a window does not fit: the flags that leave more of the same card to the KV cache, cheapest first."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gateway.planner.plan import Plan, make_plan
from gateway.planner.wish import Wish

_FEW_SEQS, _HIGH_UTILIZATION = 16, 0.95


@dataclass(frozen=True, slots=True)
class Leaner:
    """The plan with ``flags`` added: the first that holds the window, or the one that comes nearest."""

    flags: tuple[str, ...]
    plan: Plan


def leaner(plan: Plan) -> Leaner | None:
    """None where the window fits already, the KV memory is given, or nothing helps."""
    if plan.fits or plan.wish.kv_memory_gib is not None:
        return None
    best: Leaner | None = None
    wish, flags = plan.wish, list[str]()
    for flag, change in _steps(plan):
        wish, flags = replace(wish, **change), [*flags, flag]  # type: ignore[arg-type]
        found = make_plan(plan.subject, plan.card, wish, plan.behaviour, compare=False)
        if found.largest_window.value > (best.plan if best else plan).largest_window.value:
            best = Leaner(tuple(flags), found)
        if found.fits:
            break
    return best


def _steps(plan: Plan) -> list[tuple[str, dict[str, object]]]:
    wish: Wish = plan.wish
    steps: list[tuple[str, dict[str, object]]] = []
    if plan.seqs > _FEW_SEQS:
        steps.append((f"--max-num-seqs {_FEW_SEQS}", {"seqs": _FEW_SEQS}))
    if plan.subject.geometry.multimodal and not wish.text_only:
        steps.append(("--language-model-only", {"text_only": True}))
    if not wish.eager:
        steps.append(("--enforce-eager", {"eager": True}))
    if plan.utilization < _HIGH_UTILIZATION:
        steps.append((f"--gpu-memory-utilization {_HIGH_UTILIZATION}", {"utilization": _HIGH_UTILIZATION}))
    return steps
