"""A plan as text for a person and as JSON with stable keys for a program."""

from __future__ import annotations

from gateway.planner.figures import Figure, gib_text, tokens_text
from gateway.planner.flags import compose_service, recommended_window, serve_command
from gateway.planner.hardware import pitfalls
from gateway.planner.leaner import leaner
from gateway.planner.plan import Plan, layers_text
from gateway.planner.screen import shell_lines, wrapped

_KIB = 1024


def as_json(plan: Plan) -> dict[str, object]:
    """The stable shape. Every number the planner computed is ``{value, kind, low, high}``."""
    geometry = plan.subject.geometry
    return {
        "model": geometry.name,
        "card": plan.card.name,
        "vllm_version": plan.behaviour.text,
        "max_model_len": plan.window,
        "kv_cache_dtype": plan.wish.kv_dtype,
        "fits": plan.fits,
        "fits_for_certain": plan.fits and plan.certain,
        "holds_concurrency": plan.holds_all,
        "limited_by": plan.limit,
        "partial": plan.partial or None,
        "weights_gib": plan.weights.per_gpu.as_json(),
        "weights_whole_gib": plan.weights.whole.as_json(),
        "quantization": plan.weights.quant,
        "parameters": plan.weights.parameters,
        "activation_gib": plan.overheads.activation.as_json(),
        "non_torch_gib": plan.overheads.non_torch.as_json(),
        "cuda_graphs_gib": plan.overheads.graphs.as_json(),
        "lora_gib": plan.overheads.lora.as_json(),
        "gpu_memory_gib": Figure(plan.card.memory_gib, plan.requested_gib.kind).as_json(),
        "requested_gib": plan.requested_gib.as_json(),
        "gpu_memory_utilization": plan.utilization,
        "kv_bytes_per_token": plan.kv_bytes_per_token.as_json(1),
        "kv_cache_memory_gib": plan.kv_memory.as_json(),
        "kv_cache_size_tokens": plan.size_tokens.as_json(0),
        "num_gpu_blocks": plan.num_blocks.as_json(0),
        "block_size": plan.pool.block_tokens,
        "block_bytes": plan.pool.block_bytes,
        "kv_groups": len(plan.pool.groups),
        "max_concurrency": plan.max_concurrency.as_json(2),
        "largest_max_model_len": plan.largest_window.as_json(0),
        "kv_needed_gib": Figure(plan.needed_gib, plan.kv_bytes_per_token.kind).as_json(),
        "max_num_batched_tokens": plan.batched_tokens,
        "max_num_seqs": plan.seqs,
        "layers": layers_text(geometry.layers),
        "kv_dtypes": [
            {
                "kv_cache_dtype": row.kv_dtype,
                "runs": row.support.runs,
                "attention_backend": row.support.backend or None,
                "note": row.support.note,
                "kv_bytes_per_token": round(row.kv_bytes_per_token, 1),
                "kv_cache_size_tokens": row.size_tokens.as_json(0),
                "max_concurrency": row.max_concurrency.as_json(2),
                "largest_max_model_len": row.largest_window.as_json(0),
            }
            for row in plan.rows
        ],
        "warnings": list(plan.warnings),
        "pitfalls": pitfalls(plan.card, plan.wish.tp, plan.utilization),
        "leaner": _leaner_json(plan),
        "recommended_max_model_len": recommended_window(plan),
        "command": serve_command(plan) or None,
        "compose": compose_service(plan) or None,
    }


def _leaner_json(plan: Plan) -> dict[str, object] | None:
    found = leaner(plan)
    if found is None:
        return None
    return {
        "flags": list(found.flags),
        "fits": found.plan.fits,
        "largest_max_model_len": found.plan.largest_window.as_json(0),
        "command": serve_command(found.plan) or None,
    }


def as_text(plan: Plan, *, compose: bool = False, width: int = 100) -> str:
    """The page printed by ``kvgate plan``, in ``width`` columns."""
    geometry, extra = plan.subject.geometry, plan.overheads
    gpus = plan.wish.tp * plan.wish.pp
    each = " each" if gpus > 1 else ""
    parameters = f"{plan.weights.parameters / 1e9:.2f} B parameters ({plan.weights.quant})"
    lines = [
        wrapped(f"{geometry.name} on {gpus} x {plan.card.name}, vLLM {plan.behaviour.text}", width),
        wrapped(f"{parameters}, cached layers: {layers_text(geometry.layers) or 'none'}", width, "  ", "  "),
        "",
        *([wrapped(_partial(plan), width), ""] if plan.partial else []),
        wrapped(_budget_line(plan, each), width, "", "  "),
        _row("weights", plan.weights.per_gpu, width),
        _row("activation peak", extra.activation, width),
        _row("outside torch", extra.non_torch, width),
        _row("CUDA graphs" + ("" if plan.behaviour.graphs_subtracted else ", beside"), extra.graphs, width),
    ]
    if extra.lora.value:
        lines.append(_row("LoRA adapters", extra.lora, width))
    lines += [
        _row("KV cache", plan.kv_memory, width),
        "",
        f"KV cache{each}",
        _line("bytes per token", _bytes_text(plan.kv_bytes_per_token.value), str(plan.kv_bytes_per_token.kind), width),
        _row("size in tokens", plan.size_tokens, width, tokens=True),
        _line(
            f"times {tokens_text(plan.window)} tokens",
            f"{plan.max_concurrency.value:.2f}x",
            f"{plan.max_concurrency.kind}{_range(plan.max_concurrency, '{:.2f}')}",
            width,
        ),
        _row("largest window", plan.largest_window, width, tokens=True),
        _line("needed for the window", gib_text(plan.needed_gib), str(plan.kv_bytes_per_token.kind), width),
        "",
        wrapped(_verdict(plan), width),
        *_leaner_lines(plan, width),
        "",
        "KV dtypes this card runs",
        *_dtype_table(plan, width),
    ]
    notes = [*plan.warnings, *pitfalls(plan.card, plan.wish.tp, plan.utilization)]
    if notes:
        lines += ["", "Mind", *(wrapped(note, width, "  - ", "    ") for note in notes)]
    command = serve_command(plan)
    lines += ["", "Command", shell_lines(command, width) if command else "  none: nothing fits with these flags"]
    better = leaner(plan)
    if better is not None and serve_command(better.plan):
        lines += ["", "Or with those flags", shell_lines(serve_command(better.plan), width)]
    if compose and command:
        lines += ["", "Compose", *(f"  {line}" for line in compose_service(plan).splitlines())]
    return "\n".join(lines)


def _leaner_lines(plan: Plan, width: int) -> list[str]:
    found = leaner(plan)
    if found is None:
        return []
    window = found.plan.largest_window
    reach = f"{tokens_text(window.value)} ({window.kind}{_range(window, '{:,.0f}')})"
    verdict = "it fits; the largest window is then" if found.plan.fits else "the largest window is"
    return [wrapped(f"With {' '.join(found.flags)} {verdict} {reach}.", width)]


def _dtype_table(plan: Plan, width: int) -> list[str]:
    """One line a dtype; narrow terminals lose the columns that follow from the others."""
    heads = ["bytes/token", "tokens", "window", "at once"]
    kept = heads if width >= 82 else heads[::2] + heads[3:] if width >= 70 else heads[2:]
    lines = ["  " + f"{'dtype':<20}" + "".join(f"{head:>12}" for head in kept[:-1]) + f"{kept[-1]:>9}  set"]
    for row in plan.rows:
        cells = dict(
            zip(
                heads,
                (
                    _bytes_text(row.kv_bytes_per_token),
                    tokens_text(row.size_tokens.value),
                    tokens_text(row.largest_window.value),
                    f"{row.max_concurrency.value:.2f}x",
                ),
                strict=True,
            )
        )
        setting = row.support.backend or ("not on this card" if not row.support.runs else "")
        unproven = " (unproven)" if not row.support.known else ""
        lines.append(
            (
                "  "
                + f"{row.kv_dtype:<20}"
                + "".join(f"{cells[head]:>12}" for head in kept[:-1])
                + f"{cells[kept[-1]]:>9}  {setting}{unproven}"
            ).rstrip()
        )
    return lines


def _partial(plan: Plan) -> str:
    return f"Partial answer: {plan.partial}"


def _budget_line(plan: Plan, each: str) -> str:
    if plan.wish.kv_memory_gib is not None:
        return f"Memory{each} (KV budget given; the rest is what such a model usually takes)"
    memory, requested = gib_text(plan.card.memory_gib), gib_text(plan.requested_gib.value)
    return f"Memory{each} (GPU {memory} x {plan.utilization:g} = {requested})"


def _verdict(plan: Plan) -> str:
    window = tokens_text(plan.window)
    if plan.fits and not plan.holds_all:
        held = f"{plan.max_concurrency.value:.2f} of the {plan.wish.concurrency} requests asked for"
        most = int(plan.size_tokens.value // (plan.wish.concurrency or 1))
        return f"Starts with a window of {window}, but holds only {held}; about {most:,} tokens for each would fit."
    if plan.fits and plan.certain:
        return f"Fits: a window of {window} starts. Limited by {plan.limit}."
    if plan.fits:
        return f"Probably fits: {window} is inside the estimate but not at its low end. Limited by {plan.limit}."
    if plan.certain:
        advice = f"the largest window is about {tokens_text(plan.largest_window.value)}"
        if plan.largest_window.value < 1:
            advice = "no window fits: use a smaller quantisation, more GPUs (--tp) or a larger card"
        return f"Does not fit: {plan.limit}; {advice}."
    return f"Probably does not fit: {plan.limit}; the estimate's high end would. Test, or take a smaller window."


def _row(label: str, figure: Figure, width: int, *, tokens: bool = False) -> str:
    value = tokens_text(figure.value) if tokens else gib_text(figure.value)
    form = "{:,.0f}" if tokens else "{:.2f}"
    return _line(label, value, f"{figure.kind}{_range(figure, form)}", width)


def _line(label: str, value: str, trust: str, width: int) -> str:
    if width >= 72:
        return f"  {label:<26}{value:>14}  {trust}"
    line = f"  {label:<22}{value:>10} {trust}"
    return line if len(line) <= width else line.replace("estimated", "est.").replace(" .. ", "-")


def _range(figure: Figure, form: str) -> str:
    if figure.lowest == figure.highest:
        return ""
    return f" {form.format(figure.lowest)} .. {form.format(figure.highest)}"


def _bytes_text(nbytes: float) -> str:
    return f"{nbytes / _KIB:.1f} KiB" if nbytes < 1 << 20 else f"{nbytes / (1 << 20):.2f} MiB"
