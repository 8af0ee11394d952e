"""Two servers of one model with different windows: simulated ones, or real vLLM on CPU with the same flags."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx2
from e2e_metrics import Page, scrape
from e2e_processes import PLAIN, KvgateProcess, free_port
from vllm_server import VllmServer

from gateway.simulator.model import default_folder, ensure_model

MODEL = "qwen3-tiny"
BLOCK_SIZE_TOKENS = 32  # vLLM's CPU attention takes multiples of 32 only
MAX_NUM_SEQS = 16
MAX_NUM_BATCHED_TOKENS = 2048

# Window and KV blocks. A request as long as the window must fit the cache, else it would wait for ever.
SMALL = (4096, 160)
LARGE = (16384, 600)

# Real servers that run already: "http://127.0.0.1:18501 http://127.0.0.1:18502", any order, windows as above.
REUSE = "KVGATE_TEST_VLLM_URLS"


@dataclass(frozen=True)
class Backend:
    """One server as it describes itself. ``capacity_blocks`` leaves out the null block, which holds no tokens."""

    url: str
    window_tokens: int
    capacity_blocks: int
    block_size_tokens: int

    @classmethod
    def at(cls, url: str) -> Backend:
        card = httpx2.get(f"{url}/v1/models", timeout=10, **PLAIN).json()["data"][0]
        (info,) = scrape(url).named("vllm:cache_config_info")
        blocks, block_size = int(info.labels["num_gpu_blocks"]), int(info.labels["block_size"])
        return cls(url, card["max_model_len"], blocks - 1, block_size)

    @property
    def label(self) -> str:
        """Its name in the gateway's headers and metrics."""
        return urlsplit(self.url).netloc

    def metrics(self) -> Page:
        return scrape(self.url)

    def running(self) -> int:
        """Requests in vLLM's batch at its last step."""
        return int(self.metrics().sum("vllm:num_requests_running"))

    def used_blocks(self) -> int:
        """KV blocks held by requests at its last step."""
        return round(self.metrics().sum("vllm:kv_cache_usage_perc") * self.capacity_blocks)

    def holds(self, requests: int, blocks: int) -> bool:
        """Whether so many requests run and hold at least so many KV blocks, on one and the same page."""
        page = self.metrics()
        used = round(page.sum("vllm:kv_cache_usage_perc") * self.capacity_blocks)
        return page.sum("vllm:num_requests_running") == requests and used >= blocks

    def preemptions(self) -> int:
        return int(self.metrics().sum("vllm:num_preemptions_total"))

    def at_rest(self) -> bool:
        """No request running or waiting, and no KV block held."""
        page = self.metrics()
        gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        return not any(page.sum(gauge) for gauge in gauges)


@dataclass(frozen=True)
class Backends:
    """What a test has before it. ``engine`` is ``simulator`` or ``vllm``."""

    engine: str
    small: Backend
    large: Backend
    model: str = MODEL
    chat_overhead: list[int] = field(default_factory=list)

    def both(self) -> tuple[Backend, Backend]:
        return self.small, self.large

    def chat_of(self, tokens: int) -> list[dict[str, str]]:
        """Messages whose prompt has exactly ``tokens`` tokens, by the server's own count."""
        if not self.chat_overhead:
            body = {"model": self.model, "messages": [{"role": "user", "content": " a"}]}
            answer = httpx2.post(f"{self.large.url}/tokenize", json=body, timeout=30, **PLAIN)
            self.chat_overhead.append(answer.json()["count"] - 1)
        return [{"role": "user", "content": " a" * (tokens - self.chat_overhead[0])}]


@contextlib.contextmanager
def simulated(window_and_blocks: tuple[int, int], *more: str) -> Iterator[KvgateProcess]:
    """One simulated server; it is ready."""
    window, blocks = window_and_blocks
    flags = ["simulate", "--model", MODEL, "--max-model-len", str(window), "--num-gpu-blocks", str(blocks)]
    flags += ["--block-size", str(BLOCK_SIZE_TOKENS), "--max-num-seqs", str(MAX_NUM_SEQS)]
    flags += ["--max-num-batched-tokens", str(MAX_NUM_BATCHED_TOKENS), "--enable-prompt-tokens-details"]
    flags += ["--prefill-tokens-per-s", "50000", "--decode-tokens-per-s", "150"]
    server = KvgateProcess(f"simulator-{window}", [*flags, *more])
    server.start()
    try:
        server.wait_ready("/health")
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def two_simulators() -> Iterator[Backends]:
    ensure_model(default_folder())
    with simulated(SMALL) as small, simulated(LARGE) as large:
        yield Backends("simulator", Backend.at(small.url), Backend.at(large.url))


def _vllm(name: str, window_and_blocks: tuple[int, int]) -> VllmServer:
    window, blocks = window_and_blocks
    flags = ["--load-format", "dummy", "--enforce-eager", "--max-model-len", str(window)]
    flags += ["--num-gpu-blocks-override", str(blocks), "--block-size", str(BLOCK_SIZE_TOKENS)]
    flags += ["--max-num-seqs", str(MAX_NUM_SEQS), "--max-num-batched-tokens", str(MAX_NUM_BATCHED_TOKENS)]
    flags += ["--enable-prompt-tokens-details", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    folder = ensure_model(default_folder())
    return VllmServer(name=name, model=folder, port=free_port(), served_model_name=MODEL, flags=flags)


@contextlib.contextmanager
def two_vllm_servers() -> Iterator[Backends]:
    """Real servers, both starting at once; or those that ``KVGATE_TEST_VLLM_URLS`` names."""
    reused = os.environ.get(REUSE, "").replace(",", " ").split()
    with contextlib.ExitStack() as stack:
        if reused:
            urls = reused
        else:
            servers = [_vllm("small", SMALL), _vllm("large", LARGE)]
            for server in servers:
                stack.callback(server.stop)
                server.start()
            for server in servers:
                server.wait_ready()
            urls = [server.url for server in servers]
        small, large = sorted((Backend.at(url) for url in urls), key=lambda backend: backend.window_tokens)
        yield Backends("vllm", small, large)
