"""What it costs to place a request on each backend, and which one is cheapest. Pure. Costs are seconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from gateway.routing.entries import Option
from gateway.routing.prefixes import Chain
from gateway.routing.rooms import FULL_S, Room

# The price of a window twice as large as the smallest comfortable one, in seconds of waiting. Against the barrier: of
# windows of 32k and 128k the smaller one is filled to 87 % first.
WINDOW_S = 0.5
# A LoRA adapter that is not at work on a backend must be loaded, or wait until another has left its slot.
LORA_LOAD_S = 0.3
LORA_SLOT_S = 3.0
# Of two backends that cost the same the one the session was on before is taken.
SESSION_S = 0.001
# A request waits for the full backend that has its prompt for this part of the time that saves it and others, but never
# longer than the most; to save less than the least is not worth waiting for.
PATIENCE = 0.25
MOST_PATIENCE_S = 30.0
LEAST_SAVED_S = 0.05


@dataclass(frozen=True, slots=True)
class Bonds:
    """What ties a request to some backends more than to others, by their bits.

    ``matched`` are tokens of its prompt that should be in the cache there, ``extra_s`` seconds to be added to the cost.
    ``chain``: beginnings of its prompt, to tell which of its blocks others hold there already.
    """

    matched: dict[int, int] = field(default_factory=dict)
    extra_s: dict[int, float] = field(default_factory=dict)
    chain: Chain = ()


FREE = Bonds()


def adapter_s(room: Room, adapter: str) -> float:
    """Seconds until a LoRA adapter is at work there."""
    view = room.view
    if adapter in view.loras:
        return 0.0
    return LORA_SLOT_S if view.lora_slots is not None and len(view.loras) >= view.lora_slots else LORA_LOAD_S


def cheapest(options: tuple[Option, ...], claimed: int, bonds: Bonds = FREE) -> tuple[Option, Room] | None:
    """The cheapest room that the need fits into, ``claimed`` rooms left out; ``None`` if there is none."""
    matched, extra_s = bonds.matched, bonds.extra_s
    tied = bool(matched or extra_s)
    best: tuple[Option, Room] | None = None
    best_s = inf
    tier = 0
    for option in options:
        if option.tier != tier:
            if best is not None:
                break
            tier = option.tier
        rooms = option.rooms
        if claimed & option.mask:
            rooms = tuple([room for room in rooms if not room.bit & claimed])
        if option.mixed:
            calmest = _calmest(option, rooms)
            if calmest is not None and calmest.base_s + option.penalty_s < best_s:
                best, best_s = (option, calmest), calmest.base_s + option.penalty_s
            continue
        need, penalty_s = option.need, option.penalty_s
        tokens = prompt_tokens = need.prompt_tokens
        output = need.output_tokens
        size = whole = blocks = -1
        chosen: Room | None = None
        for room in rooms:
            if room.size != size:
                size = room.size
                blocks = whole = need.blocks(size)
            if tied:
                here = matched.get(room.bit, 0)
                tokens = prompt_tokens - here if here < prompt_tokens else 0
                blocks = whole - _held_blocks(room, bonds.chain) if here else whole
            if blocks <= room.spare:
                full_s = room.barrier_s / (room.rest - blocks)
            elif room.drips:
                full_s = FULL_S
            else:
                continue
            cost_s = room.base_s + tokens * room.work_s + output * room.output_s + full_s + penalty_s
            if tied and room.bit in extra_s:
                cost_s += extra_s[room.bit]
            if cost_s < best_s:
                chosen, best_s = room, cost_s
        if chosen is not None:
            best = (option, chosen)
    return best


def home(options: tuple[Option, ...], chosen: Room | None, bonds: Bonds) -> tuple[int, float] | None:
    """The bit of a backend that is full and worth waiting for, since it has more of the prompt than ``chosen`` (where
    there is room; ``None``: nowhere), and for how many seconds at most; ``None`` if there is none.

    What is saved is the prefill elsewhere, and what that would cost all who are there. So nobody waits beside an idle
    backend for longer than the prefill there takes.
    """
    found: list[tuple[float, float, int]] = []
    there: tuple[float, float, int] | None = None
    for option in options:
        if option.mixed or option.tier != options[0].tier:
            continue
        prompt_tokens = option.need.prompt_tokens
        for room in option.rooms:
            if not room.open:
                continue
            here = bonds.matched.get(room.bit, 0)
            work_s = max(0, prompt_tokens - here) * room.work_s
            this = (room.base_s + work_s + option.penalty_s, work_s, room.bit)
            if room is chosen:
                there = this
            elif not (room.drips or _fits(room, option, bonds.chain, here)):
                found.append(this)
    found.sort()
    if not found:
        return None
    other = there if there is not None else found[1] if len(found) > 1 else None
    if other is None or other < found[0]:
        return None
    saved_s = other[1] - found[0][1]
    return (found[0][2], min(MOST_PATIENCE_S, PATIENCE * saved_s)) if saved_s >= LEAST_SAVED_S else None


def _fits(room: Room, option: Option, chain: Chain, here: int) -> bool:
    blocks = option.need.blocks(room.size)
    return (blocks - _held_blocks(room, chain) if here else blocks) <= room.spare


def _held_blocks(room: Room, chain: Chain) -> int:
    """Blocks of the prompt that requests in flight hold there: they are not needed once more."""
    kv = room.view.kv
    return kv.held.shared_tokens(chain) // room.size if kv is not None and kv.held is not None else 0


def _calmest(option: Option, rooms: Iterable[Room]) -> Room | None:
    """The room with the fewest requests in flight among those with room."""
    calmest: Room | None = None
    for room in rooms:
        if not room.open:
            continue
        if room.known and not room.idle and room.reserved + option.need.blocks(room.size) > room.limit:
            continue
        if calmest is None or room.in_flight < calmest.in_flight:
            calmest = room
    return calmest
