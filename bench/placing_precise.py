"""What it is worth to know prefix caches by KV events: the gateway in the laboratory, guessing and knowing.

``python -m bench.placing_precise`` plays the laboratory's scenarios under the gateway's own placing, with guesses about
what each backend has cached and with what its KV events would tell (nothing lost, nothing late), and prints what was
expected to be cached, what was, and what became of the requests.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from bench.placing.lab import Lab
from bench.placing.ours import Gateway
from bench.placing.report import figures
from bench.placing.scenarios import NAMES, scenario
from bench.placing.traffic import BLOCK_TOKENS, Request
from gateway.block_keys import PromptBlocks
from gateway.config import PlacingSettings
from gateway.routing.blocks import BlockIndex


class Known(BlockIndex):
    """The index as KV events would have it: what it is asked, it looks up in the simulated engines themselves."""

    def __init__(self, lab: Lab) -> None:
        super().__init__()
        self._lab = lab
        self._looks = 0
        self._index_of: dict[int, int] = {}

    @property
    def changes(self) -> int:
        """The caches may have changed at any time."""
        self._looks += 1
        return self._looks

    def room(self, backend: str, bit: int) -> None:
        super().room(backend, bit)
        self._index_of[bit] = int(backend)

    def knows(self, bit: int) -> bool:
        return True

    def match(self, blocks: PromptBlocks, mask: int) -> tuple[dict[int, int], int]:
        keys = blocks.keys[BLOCK_TOKENS]
        most = max(0, blocks.tokens - 1) // BLOCK_TOKENS
        found: dict[int, int] = {}
        for bit, index in self._index_of.items():
            if bit & mask:
                run = min(most, self._lab.cached_blocks(index, keys))
                if run:
                    found[bit] = run * BLOCK_TOKENS
        for bit, run in self._shelf.hopes.match(keys, most, mask):
            found[bit] = max(found.get(bit, 0), run * BLOCK_TOKENS)
        return found, mask

    def expect(self, bit: int, blocks: PromptBlocks, have_tokens: int = 0) -> None:
        self._shelf.hopes.add(bit, blocks.keys[BLOCK_TOKENS], have_tokens // BLOCK_TOKENS, self._now_s)

    def reported(self, backend: int, request: Request) -> None:
        """A prompt was worked on: from now on its blocks are what the engine says of them."""
        bit = next(bit for bit, index in self._index_of.items() if index == backend)
        for key in request.hashes:
            self._shelf.hopes.heard(key, bit)


class Knowing(Gateway):
    """The gateway with KV events."""

    name = "kvgate, KV events"

    def __init__(self, lab: Lab, settings: PlacingSettings) -> None:
        super().__init__(lab, settings)
        self.known = self._placer.blocks = self._placer.caches.blocks = Known(lab)
        add = self._placer.add
        self._placer.add = lambda waiter, now_s: add(  # type: ignore[method-assign]
            replace(waiter, blocks=_blocks(self._waiting[waiter.sequence][1])), now_s
        )

    def first_token(self, request: Request, backend: int, now_s: float) -> None:
        self.known.reported(backend, request)
        super().first_token(request, backend, now_s)


def _blocks(request: Request) -> PromptBlocks:
    return PromptBlocks(request.prompt_tokens, {BLOCK_TOKENS: request.hashes})


def main() -> None:
    """Play, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.placing_precise", description=__doc__)
    parser.add_argument("--scenario", nargs="+", choices=NAMES, default=["agents", "uniform", "rag", "foreign"])
    parser.add_argument("--load", type=float, default=2.0, help="load level")
    parser.add_argument("--cache", type=int, nargs="+", default=[131072], help="KV tokens of a backend")
    parser.add_argument("--backends", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    heads = ("Scenario", "Cache", "", "Expected to be cached", "Came true", "Was cached", "Of all prompts", "Goodput")
    print("|", " | ".join((*heads, "First token, p50, p99", "Preemptions")), "|")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for name in options.scenario:
        for cache in options.cache:
            found = scenario(name, options.load, options.minutes * 60, options.backends, 32768, cache, ())
            for make in (Gateway, Knowing):
                lab = Lab(found.fleet, found.load, options.seed, found.window_tokens)
                gateway = make(lab, PlacingSettings())
                run = lab.run(gateway)
                done = [item for item in run.outcomes if item.finished_s is not None]
                prompts = sum(item.request.prompt_tokens for item in done)
                hits = sum(item.cached_tokens for item in done)
                indexes = (gateway._placer.prefixes, gateway._placer.blocks)
                expected = indexes[0].matched_tokens + indexes[1].expected_tokens
                confirmed = indexes[0].confirmed_tokens + indexes[1].confirmed_tokens
                shown = figures(run, options.minutes * 60)
                print(
                    f"| {name} | {cache // 1024}k | {gateway.name} | {expected / 1e6:.2f} M"
                    f" | {confirmed / max(1, expected):.1%} | {hits / 1e6:.2f} M | {hits / max(1, prompts):.1%}"
                    f" | {shown.goodput:.2f}/s | {shown.first_token_s[0]:.2f} s, {shown.first_token_s[-1]:.2f} s"
                    f" | {run.preemptions} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
