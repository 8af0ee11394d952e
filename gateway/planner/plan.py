"""The plan: one model on one card with one set of flags, and everything that follows, each number with its kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gateway.planner import pool as pools
from gateway.planner.architectures import known as known_architectures
from gateway.planner.cards import CPU_WITH_BF16, Card
from gateway.planner.cautions import cautions
from gateway.planner.checks import check_flags
from gateway.planner.deepseek_v4 import build_v4_pool
from gateway.planner.figures import GIB, Figure, Kind, weakest
from gateway.planner.geometry import ModelGeometry, first_int, is_deepseek_v4
from gateway.planner.hardware import OFFERED, Support, kv_support
from gateway.planner.kvdtypes import canonical_kv_dtype
from gateway.planner.layers import Layer, LayerKind
from gateway.planner.overhead import Overheads, RunSettings, overheads
from gateway.planner.pool import Pool, PoolSettings
from gateway.planner.storage import is_sparse_mla, resolved_dtype, stored_dtype, with_every_indexer
from gateway.planner.versions import LATEST, LATEST_TEXT, OLDEST, Behaviour, batch_defaults
from gateway.planner.weights import QUANT_BITS, Weights, weights_of
from gateway.planner.wish import Subject, Wish

_FALLBACK_WINDOW = 8192
_WIDEST_SEARCH = 16 << 20
_CARD_SPREAD = 0.01
_V4_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_ds_mla")


@dataclass(frozen=True, slots=True)
class DtypeRow:
    """What one KV dtype gives on this card."""

    kv_dtype: str
    support: Support
    kv_bytes_per_token: float
    largest_window: Figure
    size_tokens: Figure
    max_concurrency: Figure
    kv_for_context_gib: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything a front end prints. Memory figures are GiB on one GPU, the fullest rank."""

    subject: Subject
    card: Card
    wish: Wish
    behaviour: Behaviour
    window: int
    batched_tokens: int
    seqs: int
    utilization: float
    weights: Weights
    overheads: Overheads
    requested_gib: Figure
    kv_memory: Figure
    pool: Pool
    kv_bytes_per_token: Figure
    size_tokens: Figure
    max_concurrency: Figure
    largest_window: Figure
    num_blocks: Figure
    needed_gib: float
    fits: bool
    certain: bool
    limit: str
    rows: tuple[DtypeRow, ...] = ()
    warnings: tuple[str, ...] = field(default_factory=tuple)

    @property
    def holds_all(self) -> bool:
        """Whether as many requests of the window as were asked for fit at once."""
        return self.wish.concurrency is None or self.max_concurrency.value >= self.wish.concurrency

    @property
    def partial(self) -> str:
        """Why this plan is only a part of the answer, in sentences; empty when it is whole."""
        geometry, drafter = self.subject.geometry, self.wish.speculation
        reasons: list[str] = []
        if drafter is not None and drafter.unplanned:
            reasons.append(
                f"the weights and the cache of the {drafter.method} drafter are not counted, since vLLM lays them out "
                "by rules not modelled here. Expect less KV memory and fewer tokens; a log of a start with it tells."
            )
        if geometry.architecture and geometry.architecture not in known_architectures():
            reasons.append(
                f"vLLM {LATEST_TEXT} lists no architecture {geometry.architecture}. Planned as its fields say: "
                f"{layers_text(geometry.layers) or 'no cached layers'}; windows, states or shared caches that only its "
                "code knows are missing."
            )
        elif not geometry.architecture and not geometry.model_type:
            reasons.append("the config names neither architectures nor model_type, so it was read as a plain decoder.")
        if is_deepseek_v4(geometry.config) and self.wish.kv_dtype not in _V4_DTYPES:
            reasons.append(
                f"DeepSeek-V4 is planned with its fp8 rows; how {self.wish.kv_dtype} lays them out is not modelled."
            )
        return " Also: ".join(reasons)

    @property
    def support(self) -> Support:
        return _support(self.card, self.subject.geometry, self.wish.kv_dtype, self.behaviour)


def make_plan(subject: Subject, card: Card, wish: Wish, behaviour: Behaviour, *, compare: bool = True) -> Plan:
    """Compute a plan. Raises ContradictoryFlags for flags that exclude each other."""
    wish = replace(wish, kv_dtype=canonical_kv_dtype(wish.kv_dtype))
    check_flags(subject.geometry, wish)
    if wish.text_only and subject.geometry.multimodal:
        subject = subject.without_vision()
    if not behaviour.rows_by_card:
        subject = replace(subject, geometry=with_every_indexer(subject.geometry))
    geometry = subject.geometry
    window = wish.context or geometry.max_position or _FALLBACK_WINDOW
    utilization = wish.utilization if wish.utilization is not None else behaviour.default_utilization
    batched, seqs = _batching(geometry, card, wish, behaviour, window)
    run = RunSettings(
        batched,
        seqs,
        wish.tp,
        wish.eager,
        wish.lora_rank,
        wish.lora_adapters,
        window,
        card.unified,
        packed_rows=is_deepseek_v4(geometry.config)
        or stored_dtype(geometry, wish.kv_dtype, card, behaviour) == "fp8_ds_mla",
    )
    weights = _weights(subject, wish)
    requested = _requested(card, utilization)
    pool, extra, budget = _deciding_stage(subject, card, wish, behaviour, run, requested, weights)
    capacity = pools.capacity(pool, _bytes(budget.value), window, behaviour)
    counted = replace(budget, kind=weakest(budget.kind, _geometry_kind(geometry)))
    sized = _sized(pool, counted, window, behaviour)
    cap = geometry.max_position or _WIDEST_SEARCH
    largest = _largest(pool, counted, max(cap, window), behaviour)
    limit, warnings = _limits(subject, card, wish, behaviour, window, seqs, capacity, budget, weights, largest, pool)
    rows = _rows(subject, card, wish, behaviour, counted, window, batched) if compare else ()
    low_fits = pools.capacity(pool, _bytes(budget.lowest), window, behaviour).fits
    high_fits = pools.capacity(pool, _bytes(budget.highest), window, behaviour).fits
    return Plan(
        subject=subject,
        card=card,
        wish=wish,
        behaviour=behaviour,
        window=window,
        batched_tokens=batched,
        seqs=seqs,
        utilization=utilization,
        weights=weights,
        overheads=extra,
        requested_gib=requested,
        kv_memory=budget,
        pool=pool,
        kv_bytes_per_token=Figure(pool.marginal_token_bytes(), _geometry_kind(geometry)),
        size_tokens=sized[0],
        max_concurrency=sized[1],
        largest_window=largest,
        num_blocks=sized[2],
        needed_gib=capacity.needed_bytes / GIB,
        fits=capacity.fits and budget.value > 0,
        certain=low_fits == high_fits,
        limit=limit,
        rows=rows,
        warnings=tuple(warnings),
    )


def _deciding_stage(
    subject: Subject,
    card: Card,
    wish: Wish,
    behaviour: Behaviour,
    run: RunSettings,
    requested: Figure,
    weights: Weights,
) -> tuple[Pool, Overheads, Figure]:
    """Pool, overheads and budget of the pipeline stage with the fewest blocks: the last has the sampler's peak."""
    candidates: list[tuple[int, Pool, Overheads, Figure]] = []
    for last in (False, True) if wish.pp > 1 else (True,):
        pool = plan_pool(subject, wish, behaviour, card, run.batched_tokens, last_stage=last and wish.pp > 1)
        extra = overheads(subject.geometry, run, behaviour, last_stage=last)
        budget = _budget(wish, requested, weights, extra, behaviour)
        candidates.append((pool.num_blocks(_bytes(budget.value)), pool, extra, budget))
    _, pool, extra, budget = min(candidates, key=lambda candidate: candidate[0])
    return pool, extra, budget


def plan_pool(
    subject: Subject,
    wish: Wish,
    behaviour: Behaviour,
    card: Card,
    batched_tokens: int,
    *,
    last_stage: bool = False,
) -> Pool:
    """The KV pool of one GPU of the fullest pipeline stage, or of the last one."""
    geometry = subject.geometry
    speculation = wish.speculation
    drafted = speculation.tokens if speculation else 0
    added = speculation.layers(geometry, subject.draft) if speculation else ()
    own = geometry.layers
    if card.capability == CPU_WITH_BF16:
        # There the CPU backend resets recurrent states to float32 (vLLM 0.32 platforms/cpu.py).
        own = tuple(replace(one, state=replace(one.state, ssm_bytes=4)) if one.state else one for one in own)
    batches = behaviour.concurrent_batches + (wish.pp - 1 if behaviour.concurrent_batches > 1 else 0)
    drafts_without_cache = speculation is not None and not speculation.has_cache
    if behaviour.concurrent_batches > 1 and (drafts_without_cache or card.is_cpu):
        batches = wish.pp  # async scheduling is off with n-gram drafting and on the CPU backend
    hybrid_manager = wish.hybrid_manager
    if hybrid_manager is None:
        # vLLM turns the hybrid manager off by itself for chunked local attention.
        hybrid_manager = not any(layer.kind is LayerKind.CHUNKED for layer in geometry.layers)
    families = {one.state.family for one in own if one.state}
    settings = PoolSettings(
        kv_dtype=stored_dtype(geometry, wish.kv_dtype, card, behaviour),
        tp=wish.tp,
        dcp=wish.dcp,
        model_bytes=geometry.model_bytes,
        block_tokens=wish.block_tokens or default_block_tokens(geometry, card),
        in_flight_tokens=batches * batched_tokens,
        drafted_tokens=drafted,
        prefix_caching=wish.prefix_caching and behaviour.state_prefix_caching,
        every_state_kept=behaviour.mamba_keeps_every_block and bool(families & {"mamba1", "mamba2"}),
        checkpoint_blocks=behaviour.checkpoint_blocks if families & {"mamba2", "kda"} else 0,
        chunk_tokens=first_int(geometry.config, "mamba_chunk_size", "chunk_size") or 256,
        hybrid_manager=hybrid_manager and behaviour.version[:2] >= (0, 9),
        encoder_tokens=geometry.encoder_tokens,
        align_tokens=32 if card.is_cpu else 16,
    )
    if is_deepseek_v4(geometry.config):
        mtp = max(geometry.mtp_layers, 1) if added else 0
        return build_v4_pool(geometry.config, mtp, settings, behaviour)
    if wish.pp == 1:
        return pools.build_pool((*own, *added), settings, behaviour)
    whole = pools.build_pool((*own, *added), settings, behaviour)
    if len(whole.groups) == 1:
        stages = [geometry.stage(index, wish.pp) for index in range(wish.pp)]
        stages[-1] = (*stages[-1], *added)
        if last_stage:
            return pools.build_pool(stages[-1], settings, behaviour)
        return max((pools.build_pool(stage, settings, behaviour) for stage in stages), key=lambda one: one.block_bytes)
    # Groups are made of the whole model and dealt out: each stage holds its share of every group.
    return replace(whole, block_bytes=whole.block_bytes // wish.pp)


def default_block_tokens(geometry: ModelGeometry, card: Card) -> int:
    """Tokens of a block when ``--block-size`` is not given: the attention backend's preference."""
    if card.is_cpu:
        return 16 if geometry.uses_mla else 128
    if is_sparse_mla(geometry) or (geometry.uses_mla and card.sm in (90, 100, 103)):
        return 64
    return 16


def _batching(geometry: ModelGeometry, card: Card, wish: Wish, behaviour: Behaviour, window: int) -> tuple[int, int]:
    defaults = batch_defaults(behaviour, card.memory_gib, card.name, window, unified=card.unified)
    seqs = wish.seqs or defaults.seqs
    batched = wish.batched_tokens or min(defaults.batched_tokens, seqs * window)
    return batched, seqs


def _requested(card: Card, utilization: float) -> Figure:
    """What vLLM asks for. Memory of a card that no log states is known from its family to some percent."""
    gib = card.memory_gib * utilization
    if card.measured or card.kind == "unknown":  # read here, or given as --vram
        return Figure(gib, Kind.EXACT)
    if card.seen:
        return Figure(gib, Kind.MEASURED)
    return Figure(gib, Kind.ESTIMATED, gib * (1 - _CARD_SPREAD), gib * (1 + _CARD_SPREAD))


def _weights(subject: Subject, wish: Wish) -> Weights:
    quant = wish.quant or (None if subject.geometry.quantization else subject.quant_from_name)
    weights = weights_of(
        subject.geometry,
        quant=quant,
        tp=wish.tp,
        pp=wish.pp,
        known_parameters=subject.parameters,
        vision_parameters=subject.vision_parameters,
        exact_bytes=subject.exact_bytes if wish.quant is None else None,
    )
    if wish.speculation is None:
        return weights
    bits = QUANT_BITS.get(weights.quant, 16.0) if weights.quant in ("fp8", "int8") else 16.0
    added = wish.speculation.parameters(subject.geometry, subject.draft) * bits / 8 / wish.tp / GIB
    figure = weights.per_gpu
    return replace(
        weights,
        per_gpu=Figure(
            figure.value + added,
            weakest(figure.kind, Kind.ESTIMATED if added else figure.kind),
            figure.lowest + added * 0.8,
            figure.highest + added * 1.3,
            "with the drafter",
        ),
    )


def _budget(wish: Wish, requested: Figure, weights: Weights, extra: Overheads, behaviour: Behaviour) -> Figure:
    if wish.kv_memory_gib is not None:
        return Figure(wish.kv_memory_gib, Kind.EXACT, note="given")
    parts = [weights.per_gpu, extra.activation, extra.non_torch, extra.lora]
    if behaviour.graphs_subtracted:
        parts.append(extra.graphs)
    taken = sum(part.value for part in parts)
    # Independent errors: their spreads add in square, so the range does not pretend all go wrong at once.
    card = requested.highest - requested.value
    down = (card**2 + sum((part.highest - part.value) ** 2 for part in parts)) ** 0.5
    up = (card**2 + sum((part.value - part.lowest) ** 2 for part in parts)) ** 0.5
    value = requested.value - taken
    return Figure(value, Kind.ESTIMATED, value - down, value + up)


def _sized(pool: Pool, budget: Figure, window: int, behaviour: Behaviour) -> tuple[Figure, Figure, Figure]:
    middle, low, high = (
        pools.capacity(pool, _bytes(gib), window, behaviour) for gib in (budget.value, budget.lowest, budget.highest)
    )
    return (
        Figure(middle.size_tokens, budget.kind, low.size_tokens, high.size_tokens),
        Figure(middle.max_concurrency, budget.kind, low.max_concurrency, high.max_concurrency),
        Figure(middle.num_blocks, budget.kind, low.num_blocks, high.num_blocks),
    )


def _largest(pool: Pool, budget: Figure, limit: int, behaviour: Behaviour) -> Figure:
    middle, low, high = (
        pools.largest_window(pool, _bytes(gib), limit, behaviour)
        for gib in (budget.value, budget.lowest, budget.highest)
    )
    return Figure(middle, budget.kind, low, high)


def _rows(
    subject: Subject,
    card: Card,
    wish: Wish,
    behaviour: Behaviour,
    budget: Figure,
    window: int,
    batched: int,
) -> tuple[DtypeRow, ...]:
    names: Sequence[str] = dict.fromkeys((wish.kv_dtype, *OFFERED)).keys()  # type: ignore[assignment]
    rows: list[DtypeRow] = []
    cap = subject.geometry.max_position or _WIDEST_SEARCH
    for name in names:
        support = _support(card, subject.geometry, name, behaviour)
        if not support.runs and name != wish.kv_dtype:
            continue
        pool = plan_pool(subject, replace(wish, kv_dtype=name), behaviour, card, batched)
        tokens, concurrency, _ = _sized(pool, budget, window, behaviour)
        rows.append(
            DtypeRow(
                name,
                support,
                pool.marginal_token_bytes(),
                _largest(pool, budget, max(cap, window), behaviour),
                tokens,
                concurrency,
                pool.bytes_per_request(window) / GIB,
            )
        )
    return tuple(rows)


def _limits(
    subject: Subject,
    card: Card,
    wish: Wish,
    behaviour: Behaviour,
    window: int,
    seqs: int,
    capacity: pools.Capacity,
    budget: Figure,
    weights: Weights,
    largest: Figure,
    pool: Pool,
) -> tuple[str, list[str]]:
    geometry = subject.geometry
    warnings = list(geometry.notes)
    if behaviour.version[:2] > LATEST[:2]:
        warnings.append(f"vLLM {behaviour.text} is newer than what the planner knows: planned as {LATEST_TEXT}.")
    if behaviour.version[:2] < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        warnings.append(f"vLLM {behaviour.text} is older than what the planner knows: planned as {oldest}.")
    support = _support(card, geometry, wish.kv_dtype, behaviour)
    warnings.extend(cautions(subject, card, wish, behaviour))
    if not support.runs:
        warnings.append(f"--kv-cache-dtype {wish.kv_dtype} does not run here: {support.note}.")
    if geometry.max_position and window > geometry.max_position:
        warnings.append(
            f"A window of {window:,} exceeds the model's own {geometry.max_position:,}; vLLM refuses it unless rope "
            "scaling is configured (the command below does that) or VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 is set."
        )
    if geometry.hybrid and capacity.num_blocks and seqs > capacity.num_blocks and behaviour.version[:2] >= (0, 20):
        warnings.append(
            f"--max-num-seqs {seqs} exceeds the {capacity.num_blocks} state blocks: CUDA graph capture fails. "
            f"Use --max-num-seqs {max(capacity.num_blocks, 1)} or less."
        )
    if geometry.hybrid and wish.prefix_caching and not behaviour.state_caching_by_default:
        warnings.append(
            "Prefix caching of hybrid models is off by default in this release; planned with it on (the command says "
            "so). Without it a request takes fewer state blocks: --no-prefix-caching."
        )
    heads = max((layer.kv_heads for layer in geometry.layers), default=0)
    if heads and wish.tp > heads and not geometry.uses_mla:
        warnings.append(f"The model has {heads} KV heads: above --tp {heads} they are copied and KV per GPU stays.")
    if geometry.uses_mla and wish.tp > 1 and wish.dcp == 1:
        warnings.append("MLA keeps the whole latent cache on every rank: --dcp or data parallelism holds more tokens.")
    if pool.padding_layers:
        warnings.append(f"The groups are padded by {pool.padding_layers} layers; vLLM logs how much that may waste.")
    if weights.per_gpu.value >= card.memory_gib and wish.kv_memory_gib is None:
        return "weights: they do not fit on the card", warnings
    if budget.value <= 0:
        return "weights and overheads: nothing is left for the KV cache", warnings
    if not capacity.fits:
        return f"KV memory: one request of {window:,} tokens needs more", warnings
    if wish.concurrency and capacity.max_concurrency < wish.concurrency:
        return f"KV memory: {wish.concurrency} requests of {window:,} tokens do not fit at once", warnings
    if geometry.max_position and largest.value >= geometry.max_position:
        return "the model's own window", warnings
    return "KV memory", warnings


def _support(card: Card, geometry: ModelGeometry, kv_dtype: str, behaviour: Behaviour) -> Support:
    return kv_support(card, geometry, resolved_dtype(geometry, kv_dtype, card, behaviour), behaviour)


def _geometry_kind(geometry: ModelGeometry) -> Kind:
    unknown = bool(geometry.architecture) and geometry.architecture not in known_architectures()
    return Kind.ESTIMATED if unknown or is_deepseek_v4(geometry.config) else Kind.EXACT


def _bytes(gib: float) -> int:
    return int(max(gib, 0.0) * GIB)


def layers_text(layers: Sequence[Layer]) -> str:
    """``10 full + 50 sliding (1024)``: the cached layers in words."""
    counts: dict[str, int] = {}
    for layer in layers:
        span = f" ({layer.span_tokens:,})" if layer.span_tokens else ""
        family = f" ({layer.state.family})" if layer.state else ""
        key = f"{layer.kind}{span}{family}"
        counts[key] = counts.get(key, 0) + 1
    return " + ".join(f"{count} {key}" for key, count in counts.items())
