"""What a simulated server is told, and which vLLM release it imitates."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from gateway.simulator.engine import EngineConfig
from gateway.simulator.kv_events import KvEventsConfig

Eos = Literal["unbounded", "always", "never"]


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """A vLLM release, comparable; ``0.10.1.1`` and ``0.32`` are both fine."""

    numbers: tuple[int, ...]
    text: str = field(compare=False)

    @classmethod
    def parse(cls, text: str) -> Version:
        """Raises ``ValueError`` for anything that does not start with two numbers."""
        match = re.match(r"(\d+(?:\.\d+)+)", text.strip().removeprefix("v"))
        if not match:
            raise ValueError(f"{text!r} is not a vLLM version such as 0.32.0")
        numbers = [int(part) for part in match[1].split(".")]
        return cls(tuple(numbers + [0] * (4 - len(numbers))), text.strip().removeprefix("v"))

    def since(self, *numbers: int) -> bool:
        """Whether this release is ``numbers`` or later."""
        return self.numbers >= numbers


@dataclass(frozen=True, slots=True)
class SimulatorOptions:
    """Everything ``kvgate simulate`` and ``serve`` take. Defaults are vLLM's where vLLM has one.

    ``models``: served names, the first one labels the metrics. ``tokenizer``: a folder with ``tokenizer.json`` and a
    chat template; ``None`` makes the Qwen3 one. ``lora_modules``: adapter name to path. ``time_scale`` above 1 makes
    the engine that much faster than its rates say. ``mean_output_tokens``: mean length of an answer that ends by
    itself; ``eos`` says when one may. ``fault``: see ``gateway.simulator.faults``.
    ``kv_events_config``: JSON, as vLLM takes it.
    """

    models: tuple[str, ...] = ("simulated",)
    tokenizer: Path | None = None
    max_model_len: int = 32768
    num_gpu_blocks: int = 4096
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    vllm_version: str = "0.32.0"
    prefill_tokens_per_s: float = 20000.0
    decode_tokens_per_s: float = 50.0
    enable_prefix_caching: bool = True
    enable_prompt_tokens_details: bool = False
    api_keys: tuple[str, ...] = ()
    data_parallel_size: int = 1
    api_server_count: int = 1
    lora_modules: tuple[tuple[str, str], ...] = ()
    time_scale: float = 1.0
    mean_output_tokens: int = 128
    eos: Eos = "unbounded"
    fault: str | None = None
    kv_events_config: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.models or not all(self.models):
            raise ValueError("at least one served model name is needed, and none may be empty")
        for name in ("data_parallel_size", "api_server_count", "mean_output_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.time_scale <= 0:
            raise ValueError("time_scale must be above zero")
        self.version()
        self.engine_config()
        self.kv_events()

    def version(self) -> Version:
        """The release this server imitates. Raises ``ValueError``."""
        version = Version.parse(self.vllm_version)
        if not version.since(0, 8, 5):
            raise ValueError(f"vLLM {version.text} is too old to imitate: the V1 engine starts with 0.8.5 here")
        return version

    def kv_events(self) -> KvEventsConfig:
        """What is published of the KV cache. Raises ``ValueError``."""
        return KvEventsConfig.parse(self.kv_events_config or "{}")

    def engine_config(self) -> EngineConfig:
        """What each engine gets; the release decides the admission rule and the usage formula."""
        version = Version.parse(self.vllm_version)
        return EngineConfig(
            num_gpu_blocks=self.num_gpu_blocks,
            block_size_tokens=self.block_size,
            max_model_len_tokens=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            enable_prefix_caching=self.enable_prefix_caching,
            reserve_whole_prompt=version.since(0, 19),
            unfindable_blocks_first=version.since(0, 28),
            null_block_in_usage=not version.since(0, 10, 2),
            prefill_tokens_per_s=self.prefill_tokens_per_s * self.time_scale,
            decode_tokens_per_s=self.decode_tokens_per_s * self.time_scale,
        )
