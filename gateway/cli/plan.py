"""``kvgate plan``: what fits on a card, and the flags that say so."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.planner.cards import Card
    from gateway.planner.matrix import Cell
    from gateway.planner.wish import Wish

_EXAMPLES = """examples:
  kvgate plan Qwen/Qwen2.5-32B-Instruct-AWQ --gpu "RTX 4090" --context 16384
  kvgate plan ./my-model --vram 24 --kv-dtype fp8 --json
  kvgate plan --matrix --gpu "RTX 3090" --markdown
exit status: 0 window and concurrency fit, 1 they do not, 2 wrong usage or something is missing
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLES
    parser.add_argument("model", nargs="*", metavar="MODEL", help="config.json, model folder, catalogue name or hub id")
    card = parser.add_argument_group("card")
    card.add_argument("--gpu", help="a card by name; without it and --vram, what NVML finds here")
    card.add_argument("--vram", type=float, metavar="GIB", help="memory of a card not in the table, in GiB")
    card.add_argument("--list-gpus", action="store_true", help="print the card table and stop")
    card.add_argument("--list-models", action="store_true", help="print the catalogue and stop")
    flags = parser.add_argument_group("vLLM flags")
    flags.add_argument("--tp", type=int, default=1, help="tensor parallel size")
    flags.add_argument("--pp", type=int, default=1, help="pipeline parallel size")
    flags.add_argument("--dcp", type=int, default=1, help="decode context parallel size")
    flags.add_argument("--context", type=_tokens, metavar="TOKENS", help="window wanted (32768, 32k=32000, 32K=32768)")
    flags.add_argument("--concurrency", type=int, metavar="N", help="requests of that window wanted at once")
    flags.add_argument("--quant", help="weight quantisation, when the config does not say it (awq, fp8, nvfp4 ...)")
    flags.add_argument("--kv-dtype", default="auto", help="--kv-cache-dtype")
    flags.add_argument("--vllm-version", metavar="X.Y.Z", help="plan for this release (default: the newest known)")
    flags.add_argument("--gpu-memory-utilization", type=float, metavar="SHARE")
    flags.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    flags.add_argument("--language-model-only", action="store_true", help="without the vision tower of a VLM")
    flags.add_argument("--max-num-batched-tokens", type=int, metavar="N")
    flags.add_argument("--max-num-seqs", type=int, metavar="N")
    flags.add_argument("--block-size", type=int, metavar="TOKENS")
    flags.add_argument("--no-prefix-caching", action="store_true")
    flags.add_argument("--disable-hybrid-kv-cache-manager", action="store_true")
    flags.add_argument("--speculative", metavar="SPEC", help="mtp:3, eagle3:2, ngram:4, draft_model:NAME:5 or JSON")
    flags.add_argument("--lora", metavar="N[:RANK]", help="adapters held at once and their largest rank")
    flags.add_argument("--kv-memory", type=float, metavar="GIB", help="start from a known KV budget of one GPU")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="stable keys, every number with its kind and range")
    output.add_argument("--compose", action="store_true", help="print a compose service too")
    output.add_argument("--matrix", action="store_true", help="models x KV dtypes for the card")
    output.add_argument("--kv-dtypes", metavar="A,B", help="KV dtypes of the matrix (default auto,fp8)")
    output.add_argument("--markdown", action="store_true", help="the matrix as Markdown")
    output.add_argument("--csv", action="store_true", help="the matrix as CSV")
    output.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw memory bars and window curves")
    output.add_argument("--offline", action="store_true", help="never ask the hub")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print what was asked for."""
    from gateway.planner.errors import PlannerError

    try:
        return _run(options)
    except PlannerError as error:
        print(f"kvgate plan: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(options: argparse.Namespace) -> int:
    from gateway.planner import report
    from gateway.planner.errors import ContradictoryFlags
    from gateway.planner.matrix import Cell
    from gateway.planner.plan import make_plan
    from gateway.planner.screen import columns
    from gateway.planner.source import load_subject, with_draft
    from gateway.planner.versions import behaviour_of

    if options.list_gpus or options.list_models:
        _print_lists(options)
        return 0
    if not options.matrix and len(options.model) != 1:
        raise ContradictoryFlags("give one MODEL (or --matrix for several); see kvgate plan --help.")
    if not options.matrix and (options.markdown or options.csv):
        raise ContradictoryFlags("--markdown and --csv belong to --matrix.")
    behaviour = behaviour_of(options.vllm_version)
    wish = _wish(options)
    card = _card(options)
    if options.matrix:
        return _matrix(options, card)
    subject = with_draft(
        load_subject(options.model[0], offline=options.offline), wish.speculation, offline=options.offline
    )
    plan = make_plan(subject, card, wish, behaviour)
    if options.picture:
        _draw(options.picture, [Cell(plan.subject.geometry.name, plan.wish.kv_dtype, plan)], card)
    if options.json:
        print(json.dumps(report.as_json(plan), indent=2))
    else:
        print(report.as_text(plan, compose=options.compose, width=columns()))
    return 0 if plan.fits and plan.holds_all else 1


def _matrix(options: argparse.Namespace, card: Card) -> int:
    from gateway.planner import matrix
    from gateway.planner.kvdtypes import canonical_kv_dtype
    from gateway.planner.screen import columns
    from gateway.planner.source import load_subject
    from gateway.planner.versions import behaviour_of

    behaviour = behaviour_of(options.vllm_version)
    names = options.model or list(matrix.DEFAULT_MODELS)
    asked = [name.strip() for name in (options.kv_dtypes or "").split(",") if name.strip()]
    dtypes = [canonical_kv_dtype(name) for name in asked] or list(matrix.DEFAULT_DTYPES)
    subjects = [(name, load_subject(name, offline=options.offline)) for name in names]
    cells = matrix.make_matrix(subjects, card, _wish(options), behaviour, dtypes)
    if options.picture:
        _draw(options.picture, cells, card)
    if options.json:
        print(json.dumps(matrix.as_records(cells), indent=2))
    elif options.markdown:
        print(matrix.as_markdown(cells), end="")
    elif options.csv:
        print(matrix.as_csv(cells), end="")
    else:
        print(matrix.as_text(cells, card, behaviour, columns()))
    return 0


def _draw(path: Path, cells: Sequence[Cell], card: Card) -> None:
    from gateway.planner.errors import PlannerError
    from gateway.planner.picture import draw

    if path.suffix.lower() != ".svg":
        raise PlannerError(f"--picture writes SVG; name it {path.stem}.svg.")
    text = draw(cells, f"Memory on {card.name}, {card.memory_gib:.1f} GiB")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlannerError(f"cannot write {path}: {error.strerror}.") from error


def _wish(options: argparse.Namespace) -> Wish:
    from gateway.planner.errors import ContradictoryFlags
    from gateway.planner.speculation import parse_speculation
    from gateway.planner.wish import Wish

    adapters, _, rank = (options.lora or "0").partition(":")
    if not _is_number(adapters) or (rank and not _is_number(rank)):
        raise ContradictoryFlags("--lora takes the number of adapters and, after a colon, their rank: 4:16.")
    return Wish(
        tp=options.tp,
        pp=options.pp,
        dcp=options.dcp,
        context=options.context,
        concurrency=options.concurrency,
        quant=options.quant,
        kv_dtype=options.kv_dtype,
        utilization=options.gpu_memory_utilization,
        eager=options.enforce_eager,
        batched_tokens=options.max_num_batched_tokens,
        seqs=options.max_num_seqs,
        block_tokens=options.block_size,
        prefix_caching=not options.no_prefix_caching,
        hybrid_manager=False if options.disable_hybrid_kv_cache_manager else None,
        speculation=parse_speculation(options.speculative),
        lora_adapters=int(adapters),
        lora_rank=int(rank) if rank else 16,
        kv_memory_gib=options.kv_memory,
        text_only=options.language_model_only,
    )


def _card(options: argparse.Namespace) -> Card:
    from dataclasses import replace

    from gateway.planner.cards import UNSTATED, card_of_memory, find_card
    from gateway.planner.errors import ContradictoryFlags, UnknownCard

    if options.vram is not None and not 0 < options.vram < 1 << 20:
        raise ContradictoryFlags("--vram is the card's memory in GiB, above 0 and below 1,048,576.")
    if options.gpu:
        card = find_card(options.gpu)
        return card if options.vram is None else replace(card, memory_gib=options.vram)
    if options.vram is not None:
        return card_of_memory(options.vram)
    from gateway.planner.gpus import planned_card

    card_here = planned_card(options.tp * options.pp)
    if card_here is not None:
        return card_here
    if options.kv_memory is not None:
        return UNSTATED
    raise UnknownCard("no GPU was found here: name one with --gpu, or its memory with --vram.")


def _print_lists(options: argparse.Namespace) -> None:
    if options.list_gpus:
        from gateway.planner.cards import table

        for card in table():
            bandwidth = f"{card.bandwidth_gbps} GB/s"
            trust = "from logs" if card.seen else "estimated"
            print(
                f"{card.name:<22}{card.memory_gib:>8.2f} GiB {trust:<11}{card.capability:<8}{bandwidth:>10}  "
                f"{card.note}".rstrip()
            )
    if options.list_models:
        from gateway.planner.catalogue import entries

        for name, entry in entries().items():
            print(f"{name:<60} {entry.source or 'unchecked'}")


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 9


def _tokens(text: str) -> int:
    """vLLM's own spelling: 32k is 32000, 32K is 32768."""
    units = {"k": 1000, "K": 1024, "m": 1_000_000, "M": 1 << 20}
    try:
        if text[-1:] in units:
            return int(float(text[:-1]) * units[text[-1]])
        return int(text)
    except (ValueError, OverflowError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens") from error
