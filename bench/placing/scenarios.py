"""The laboratory's scenarios by name: what backends there are, and who asks what of them.

All but ``mixed`` have equal backends: windows of 32,768 tokens, caches of 131,072 (a card as ordinary people have it
holds a few windows, not dozens), 12,000 prompt tokens a second, 40 output tokens a second to each request. Rates are
for four backends and grow with their number; a *load level* multiplies them.

=========  =============================================================================================================
uniform    agents, chats, questions on documents and batches: by tokens mostly agents, by number mostly the others
mixed      windows of 8k, 32k, 32k, 131k, with caches of 49k, 131k, 131k and 262k, at 1, 2, 2 and 3 times 6,000 and 20
           tokens a second; agents believe in windows of 8k (a fifth), 32k (half) or 131k, and grow into them, so that
           some requests fit only the largest. Routers that do not ask for windows send requests where they cannot be
           served, as they do in life
mixed-told as mixed, with every baseline told the windows, as if an operator had labelled the backends
foreign    as uniform, and beside it 1.2 requests a second of 3,000 tokens at the first backend that no router sees
flood      as uniform, and beside it one key that sends, of each kind, ten times what another key of that kind does: the
           load is more than doubled. The figure to watch is the others' time to the first token, with and without it
dies       as uniform; the first backend's process dies at a third of the time and is back, empty, at half of it
bursty     as uniform, but sessions come at five times the rate for 30 s in every five minutes
rag        nearly only questions on 100 documents of 4,000 to 12,000 tokens: 800,000 tokens for caches of 524,000
agents     only agents
replay     only recorded conversations (``--conversations``), a new one every two seconds
=========  =============================================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.placing.terms import Fleet
from bench.placing.traffic import Load, Turn
from gateway.simulator.engine import EngineConfig

NAMES = ("uniform", "mixed", "mixed-told", "foreign", "flood", "dies", "bursty", "rag", "agents", "replay")
FLOOD_TIMES = 10.0
REPLAYS = 0.5
# Sessions a second at load level 1 on four backends.
RATES = {"agent": 0.02, "chat": 0.1, "rag": 0.1, "batch": 0.05}
RATES_OF = {
    "rag": {"agent": 0.002, "chat": 0.05, "rag": 0.5, "batch": 0.02},
    "agents": {"agent": 0.06},
    "replay": {"replay": REPLAYS},
}


@dataclass(frozen=True, slots=True)
class Scenario:
    """A fleet, its traffic, the window that clients believe in, and whether baselines are told the windows."""

    name: str
    fleet: Fleet
    load: Load
    window_tokens: int
    told: bool = False


def engine(window_tokens: int, cache_tokens: int, prefill: float = 12000.0, decode: float = 40.0) -> EngineConfig:
    """A backend with a cache of ``cache_tokens``; rates in tokens a second."""
    return EngineConfig(
        num_gpu_blocks=cache_tokens // 16,
        block_size_tokens=16,
        max_model_len_tokens=window_tokens,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        prefill_tokens_per_s=prefill,
        decode_tokens_per_s=decode,
    )


MIXED = (
    engine(8192, 49152, 6000.0, 20.0),
    engine(32768, 131072, 12000.0, 40.0),
    engine(32768, 131072, 12000.0, 40.0),
    engine(131072, 262144, 18000.0, 60.0),
)
WINDOWS = ((8192, 0.2), (32768, 0.5), (131072, 0.3))


def scenario(
    name: str,
    level: float,
    duration_s: float,
    backends: int = 4,
    window_tokens: int = 32768,
    cache_tokens: int = 131072,
    conversations: tuple[tuple[Turn, ...], ...] = (),
) -> Scenario:
    """The scenario of this name. ``conversations`` are replayed beside what it has. ``ValueError`` if it needs them."""
    if name == "replay" and not conversations:
        raise ValueError("scenario replay needs recorded conversations")
    times = level * backends / 4
    rates = {kind: rate * times for kind, rate in RATES_OF.get(name, RATES).items()}
    if conversations:
        rates.setdefault("replay", REPLAYS / 4 * times)
    load = Load(rates, duration_s, conversations=conversations)
    fleet = Fleet(tuple(engine(window_tokens, cache_tokens) for _ in range(backends)))
    if name in ("mixed", "mixed-told"):
        load = replace(load, windows=WINDOWS)
        fleet = Fleet(tuple(MIXED[index % len(MIXED)] for index in range(backends)))
        return Scenario(name, fleet, load, 32768, told=name == "mixed-told")
    if name == "foreign":
        load = replace(load, rates=rates | {"foreign": 0.6})  # of two requests on average
    elif name == "flood":
        load = replace(load, flood=FLOOD_TIMES)
    elif name == "dies":
        fleet = replace(fleet, dies_s=duration_s / 3, back_s=duration_s / 2)
    elif name == "bursty":
        load = replace(load, bursty=True)
    return Scenario(name, fleet, load, window_tokens)


def without_flood(found: Scenario) -> Scenario:
    """The same without its flooding key: all others send what they sent."""
    return replace(found, load=replace(found.load, flood=0.0))
