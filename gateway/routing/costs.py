"""What it costs to place a request on each backend, and which one is cheapest. Pure. Costs are seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf

from gateway.routing.entries import Option
from gateway.routing.keeping import Keeper
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


@dataclass(slots=True)
class Bonds:
    """What ties a request to some backends more than to others, by their bits.

    ``matched`` are tokens of its prompt that should be in the cache there, ``extra_s`` seconds to be added to the cost.
    ``chain``: beginnings of its prompt, to tell which of its blocks others hold there already.
    """

    matched: Mapping[int, int]
    extra_s: Mapping[int, float]
    chain: Chain = ()


Full = list[tuple[Option, Room]]


def adapter_s(room: Room, adapter: str) -> float:
    """Seconds until a LoRA adapter is at work there."""
    view = room.view
    if adapter in view.loras:
        return 0.0
    return LORA_SLOT_S if view.lora_slots is not None and len(view.loras) >= view.lora_slots else LORA_LOAD_S


def cheapest(
    options: tuple[Option, ...],
    claimed: int,
    keeper: Keeper,
    bonds: Bonds | None = None,
    full: Full | None = None,
) -> tuple[Option, Room] | None:
    """The cheapest room that the need fits into, ``claimed`` rooms left out; ``None`` if there is none.

    ``keeper`` tells which rooms it must stay out of, though it fits, and then knows of it (``stopped``). ``full`` is
    told the rooms that the need may not fit into, if nothing is claimed: those that ``home`` is to look at.
    """
    keeper.stopped = keeper.passed = 0
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
        chosen, best_s = (
            _cheaper(option, rooms, best_s, keeper)
            if bonds is None
            else _cheaper_tied(option, rooms, best_s, keeper, bonds, full)
        )
        if chosen is not None:
            best = (option, chosen)
    return best


def _cheaper(option: Option, rooms: Iterable[Room], best_s: float, keeper: Keeper) -> tuple[Room | None, float]:
    """The cheapest of ``rooms`` and its cost, if that is less than ``best_s``."""
    need, penalty_s = option.need, option.penalty_s
    tokens, output = need.prompt_tokens, need.output_tokens
    size = blocks = -1
    chosen: Room | None = None
    for room in rooms:
        if room.size != size:
            size = room.size
            blocks = need.blocks(size)
        fits = blocks <= room.spare
        if not (fits or room.drips):
            continue
        cost_s = room.base_s + tokens * room.work_s + output * room.output_s
        if cost_s >= best_s:
            continue  # the rest only adds to it
        cost_s = cost_s + (room.barrier_s / (room.rest - blocks) if fits else FULL_S) + penalty_s
        if cost_s < best_s and (
            (blocks + room.most_kept <= room.spare and not room.bit & keeper.closed)  # as most often: no call
            or not keeper.stops(room, tokens, tokens, blocks)
        ):
            chosen, best_s = room, cost_s
    return chosen, best_s


def _cheaper_tied(
    option: Option, rooms: Iterable[Room], best_s: float, keeper: Keeper, bonds: Bonds, full: Full | None
) -> tuple[Room | None, float]:
    """The same for a request with bonds. What others hold of its prompt is looked up only where that can matter: in
    rooms that would be cheaper than the best so far if all of it were held."""
    need, penalty_s = option.need, option.penalty_s
    prompt_tokens, output = need.prompt_tokens, need.output_tokens
    matched, extra_s, chain = bonds.matched, bonds.extra_s, bonds.chain
    chain_tokens = chain[-1][1] if chain else 0
    size = whole = least = -1
    links = 0
    chosen: Room | None = None
    for room in rooms:
        if room.size != size:
            size = room.size
            whole = need.blocks(size)
            least = whole - chain_tokens // size
        bit, spare = room.bit, room.spare
        here = matched.get(bit, 0)
        if whole > spare and full is not None and room.open and not room.drips:
            full.append((option, room))
        tokens, blocks, held = prompt_tokens, whole, None
        if here:
            tokens = prompt_tokens - here if here < prompt_tokens else 0
            held = room.held
            if held is not None:
                blocks = least
        work_s = room.base_s + tokens * room.work_s + output * room.output_s
        extra = extra_s.get(bit, 0.0) if extra_s else 0.0
        if blocks > spare:
            if not room.drips:
                continue
            cost_s = work_s + FULL_S + penalty_s + extra
        else:
            cost_s = work_s + room.barrier_s / (room.rest - blocks) + penalty_s + extra
        if held is not None and (cost_s < best_s or room.drips):
            links = held.shared_links(chain, links)
            blocks = whole - chain[links - 1][1] // size if links else whole
            if blocks <= spare:
                cost_s = work_s + room.barrier_s / (room.rest - blocks) + penalty_s + extra
            elif room.drips:
                cost_s = work_s + FULL_S + penalty_s + extra
            else:
                continue
        if cost_s < best_s and not keeper.stops(room, tokens, prompt_tokens, blocks):
            chosen, best_s = room, cost_s
    return chosen, best_s


def home(
    options: tuple[Option, ...], chosen: tuple[Option, Room] | None, bonds: Bonds, full: Full
) -> tuple[int, float] | None:
    """The bit of a backend that is full (one of ``full``) and worth waiting for, since it has more of the prompt than
    ``chosen`` (where there is room; ``None``: nowhere), and for how many seconds at most; ``None`` if there is none.

    What is saved is the prefill elsewhere, and what that would cost all who are there. So nobody waits beside an idle
    backend for longer than the prefill there takes.
    """
    tier = options[0].tier
    there: tuple[float, float, int] | None = None
    if chosen is not None and chosen[0].tier == tier and not chosen[0].mixed:
        there = _work(*chosen, bonds)
    order = sorted(
        [(_work(option, room, bonds), place) for place, (option, room) in enumerate(full) if option.tier == tier]
    )
    found: list[tuple[float, float, int]] = []
    for work, place in order:
        if there is not None and there < work:
            return None
        if not _fits(*full[place], bonds):
            found.append(work)
            if there is not None or len(found) > 1:
                break
    other = there if there is not None else found[1] if len(found) > 1 else None
    if other is None or not found:
        return None
    saved_s = other[1] - found[0][1]
    return (found[0][2], min(MOST_PATIENCE_S, PATIENCE * saved_s)) if saved_s >= LEAST_SAVED_S else None


def _work(option: Option, room: Room, bonds: Bonds) -> tuple[float, float, int]:
    """Seconds until the prompt is prefilled there, those of its own work alone, and the room's bit."""
    work_s = max(0, option.need.prompt_tokens - bonds.matched.get(room.bit, 0)) * room.work_s
    return room.base_s + work_s + option.penalty_s, work_s, room.bit


def _fits(option: Option, room: Room, bonds: Bonds) -> bool:
    """Whether the request fits. What others hold of its prompt already is not needed once more."""
    blocks = option.need.blocks(room.size)
    if room.held is not None and bonds.matched.get(room.bit, 0):
        blocks -= room.held.shared_tokens(bonds.chain) // room.size
    return blocks <= room.spare


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
