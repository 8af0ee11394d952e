"""``python -m bench.placing``: the same traffic under every policy, one table a load level."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from bench.placing.lab import AtOnce, Fleet, Lab, Placer
from bench.placing.ours import Gateway
from bench.placing.policies import CacheAware, EndpointPicker, LeastInFlight, NoGateway, PowerOfTwo, RoundRobin
from bench.placing.report import Figures, figures, table
from bench.placing.traffic import Load
from gateway.config import PlacingSettings
from gateway.simulator.engine import EngineConfig

Make = Callable[[Lab], Placer]

PLACERS: dict[str, Make] = {
    "none": lambda lab: AtOnce(lab, NoGateway()),
    "round-robin": lambda lab: AtOnce(lab, RoundRobin()),
    "least": lambda lab: AtOnce(lab, LeastInFlight()),
    "two": lambda lab: AtOnce(lab, PowerOfTwo()),
    "cache-aware": lambda lab: AtOnce(lab, CacheAware(len(lab.seen))),
    "picker": lambda lab: AtOnce(lab, EndpointPicker([seen.capacity_blocks for seen in lab.seen])),
    "kvgate": lambda lab: Gateway(lab, PlacingSettings()),
}


def engine(window_tokens: int, cache_tokens: int, prefill: float = 12000.0, decode: float = 40.0) -> EngineConfig:
    """A card as ordinary people have it: its cache holds a few windows, not dozens."""
    return EngineConfig(
        num_gpu_blocks=cache_tokens // 16,
        block_size_tokens=16,
        max_model_len_tokens=window_tokens,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        prefill_tokens_per_s=prefill,
        decode_tokens_per_s=decode,
    )


def mixed(rate: float, agents: float = 1.0) -> dict[str, float]:
    """Sessions a second: mostly agents by tokens, mostly chats by number."""
    return {"agent": 0.02 * rate * agents, "chat": 0.1 * rate, "rag": 0.1 * rate, "batch": 0.05 * rate}


def main() -> None:
    """Run the laboratory."""
    parser = argparse.ArgumentParser(prog="python -m bench.placing", description=__doc__)
    parser.add_argument("--backends", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--window", type=int, default=32768)
    parser.add_argument("--cache", type=int, default=131072, help="KV tokens of a backend")
    parser.add_argument("--load", type=float, nargs="+", default=[1.0, 2.0, 3.0], help="load levels")
    parser.add_argument("--policy", nargs="+", choices=PLACERS, default=list(PLACERS))
    parser.add_argument("--bursty", action="store_true")
    parser.add_argument("--flood", action="store_true", help="one key sends half of all sessions")
    parser.add_argument("--dies", action="store_true", help="a backend dies at a third of the time and comes back")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    duration_s = options.minutes * 60
    fleet = Fleet(
        tuple(engine(options.window, options.cache) for _ in range(options.backends)),
        dies_s=duration_s / 3 if options.dies else None,
        back_s=duration_s / 2 if options.dies else None,
    )
    for level in options.load:
        load = Load(mixed(level * options.backends / 4), duration_s, options.bursty, options.flood)
        rows: list[Figures] = []
        print(
            f"\nload {level:g}: {options.backends} backends of {options.cache} KV tokens, {options.minutes:g} minutes"
        )
        for name in options.policy:
            began_s = time.perf_counter()
            lab = Lab(fleet, load, options.seed, options.window)
            rows.append(figures(lab.run(PLACERS[name](lab)), duration_s))
            print(f"  {rows[-1].policy}: {time.perf_counter() - began_s:.1f} s", flush=True)
        print(table(rows), flush=True)


if __name__ == "__main__":
    main()
