"""What is asked of a plan: the model, and the flags it is to run with."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gateway.planner.geometry import ModelGeometry
from gateway.planner.parameters import count_parameters
from gateway.planner.speculation import Speculation


@dataclass(frozen=True, slots=True)
class Wish:
    """What the person asks for. None means vLLM's default for that release and card."""

    tp: int = 1
    pp: int = 1
    dcp: int = 1
    context: int | None = None
    concurrency: int | None = None
    quant: str | None = None
    kv_dtype: str = "auto"
    utilization: float | None = None
    eager: bool = False
    batched_tokens: int | None = None
    seqs: int | None = None
    block_tokens: int | None = None
    prefix_caching: bool = True
    hybrid_manager: bool | None = None
    speculation: Speculation | None = None
    lora_adapters: int = 0
    lora_rank: int = 16
    kv_memory_gib: float | None = None
    text_only: bool = False


@dataclass(frozen=True, slots=True)
class Subject:
    """The model: its geometry and what else is known of its weights."""

    geometry: ModelGeometry
    parameters: int | None = None
    vision_parameters: int | None = None
    exact_bytes: int | None = None
    draft: ModelGeometry | None = None
    quant_from_name: str | None = None

    def without_vision(self) -> Subject:
        """``--language-model-only``: no vision tower is loaded or profiled."""
        vision = self.vision_parameters
        if vision is None:
            vision = count_parameters(self.geometry).vision
        return replace(
            self,
            geometry=replace(self.geometry, multimodal=False),
            parameters=None if self.parameters is None else self.parameters - vision,
            vision_parameters=0,
            exact_bytes=None if self.exact_bytes is None else self.exact_bytes - vision * self.geometry.model_bytes,
        )
