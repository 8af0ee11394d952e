"""What every generating route shares: model check, rendering, length checks, the answer, the trip through an engine."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from gateway.simulator.answers import Answer, Wishes, Writer
from gateway.simulator.engine import Engine, EngineRequest, FinishReason, StepResult
from gateway.simulator.errors import (
    Api,
    ApiError,
    Lengths,
    check_lengths,
    schema_error,
    unknown_model,
    validation_error,
)
from gateway.simulator.faults import Faults
from gateway.simulator.frontend import Frontend
from gateway.simulator.kv_events import Publisher
from gateway.simulator.metrics import EngineMetrics
from gateway.simulator.options import SimulatorOptions
from gateway.simulator.rendering import Renderer


@dataclass(frozen=True, slots=True)
class Piece:
    """One token of one choice. ``text`` is what it adds; ``finish_reason`` ends the choice."""

    choice: int
    text: str
    token_id: int | None
    finish_reason: FinishReason | None
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Job:
    """A request ready for the engine. Choice ``i`` answers prompt ``i // n``."""

    request_id: str
    model: str
    prompts: tuple[list[int], ...]
    n: int
    answers: tuple[Answer, ...]
    rank: int | None = None
    cache_key: object = None
    skip_cache: bool = False

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


# vLLM's default VLLM_MAX_N_SEQUENCES.
MOST_SEQUENCES = 16384


class Service:
    """One simulated server's state and the steps its routes are made of."""

    def __init__(self, options: SimulatorOptions, renderer: Renderer) -> None:
        self.options = options
        self.version = options.version()
        self.renderer = renderer
        self.writer = Writer(
            renderer, seed=options.seed, mean_output_tokens=options.mean_output_tokens, eos=options.eos
        )
        self.metrics = EngineMetrics(options)
        self.faults = Faults(options.fault)
        self.publishers: list[Publisher] = []
        self.frontend = Frontend(
            options.engine_config(),
            data_parallel_size=options.data_parallel_size,
            publish=self._publish,
            api_servers=options.api_server_count,
            counts_own=self.version.since(0, 32),
        )

    def start(self) -> None:
        """Begin to publish and to work. Needs a running loop."""
        self.bind()
        for publisher in self.publishers:
            publisher.start()
        self.frontend.start()

    def bind(self) -> None:
        """Take the addresses that are published at, if they were not taken before. Raises ``ValueError``."""
        config = self.options.kv_events()
        if not config.publishes or self.publishers:
            return
        adapters = [name for name, _ in self.options.lora_modules]
        for rank, engine in enumerate(self.frontend.engines):
            engine.pool.journal = []
            self.publishers.append(Publisher(config, rank, self.version.since, adapters))

    async def stop(self) -> None:
        """Stop both."""
        await self.frontend.stop()
        for publisher in self.publishers:
            publisher.stop()
        self.publishers.clear()

    def _publish(self, rank: int, engine: Engine, result: StepResult) -> None:
        """A step is over."""
        self.metrics.publish(rank, engine, result)
        if self.publishers:
            self.publishers[rank].publish(engine.pool, engine.config.block_size_tokens)

    def model_of(self, document: Mapping[str, Any]) -> str:
        """The served name the request is for; the first one if it names none. Raises ``ApiError`` (404)."""
        model = document.get("model")
        if not model:
            return self.options.models[0]
        known = [*self.options.models, *(name for name, _ in self.options.lora_modules)]
        if not isinstance(model, str):
            raise schema_error(self.version, "string_type", ("body", "model"), "Input should be a valid string", model)
        if model not in known:
            raise unknown_model(self.version, model, self.options.models)
        return model

    def integer(self, document: Mapping[str, Any], key: str, default: int | None = None) -> int | None:
        """An integer field, absent and null alike. Raises ``ApiError`` for anything else."""
        value = document.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            text = "Input should be a valid integer"
            raise schema_error(self.version, "int_type", ("body", key), text, value)
        return value

    def chat_ids(self, document: Mapping[str, Any], *, generating: bool = True) -> tuple[list[int], str]:
        """Token ids and text of a chat's prompt. ``/tokenize`` reads fewer fields than the chat route does."""
        messages = document.get("messages")
        if not isinstance(messages, list):
            kind, text = ("missing", "Field required") if messages is None else ("list_type", "Input should be a list")
            raise schema_error(self.version, kind, ("body", "messages"), text, messages if messages else {})
        if document.get("chat_template") and generating:
            raise ApiError(
                "Chat template is passed with request, but --trust-request-chat-template is not set. "
                "Refused request with untrusted chat template."
            )
        add = document.get("add_generation_prompt", True)
        resume = document.get("continue_final_message", False)
        if add and resume and "add_generation_prompt" in document:
            raise ApiError("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
        kwargs = dict(document.get("chat_template_kwargs") or {})
        effort = document.get("reasoning_effort")
        if generating and effort is not None:
            kwargs.setdefault("reasoning_effort", effort)
            kwargs.setdefault("enable_thinking", effort != "none")
        text = self.renderer.chat_text(
            messages,
            tools=self._tools(document),
            kwargs=kwargs,
            add_generation_prompt=bool(add) and not resume,
            continue_final_message=bool(resume),
            documents=document.get("documents") if generating else None,
        )
        special = bool(document.get("add_special_tokens", False))
        return self.renderer.encode(text, add_special_tokens=special), text

    def _tools(self, document: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
        tools = document.get("tools")
        if tools is None:
            return None
        if not isinstance(tools, list):
            raise schema_error(self.version, "list_type", ("body", "tools"), "Input should be a valid list", tools)
        if not tools and self.version.since(0, 32):
            text = "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely."
            raise ApiError(f"{text} (parameter=tools)", param="tools")
        return tools or None

    def fit(
        self,
        api: Api,
        ids: list[int],
        document: Mapping[str, Any],
        *,
        asked: int | None,
        field: str = "max_tokens",
        text: str | None = None,
    ) -> tuple[list[int], int]:
        """The prompt, cut if ``truncate_prompt_tokens`` says so, and its output budget in tokens."""
        window = self.options.max_model_len
        keep = self.integer(document, "truncate_prompt_tokens")
        if keep is not None:
            limit = window if api == "pooling" else window - 1
            if keep > window:
                words = f"truncate_prompt_tokens={keep} cannot be greater than max_model_len = {window}."
                words += " Please request a smaller truncation size."
                raise validation_error(self.version, words, "truncate_prompt_tokens", keep)
            keep = limit if keep < 0 else min(keep, limit)
            ids = ids[:keep] if document.get("truncation_side") == "right" else ids[max(0, len(ids) - keep) :]
            text = None
        if not ids:
            raise ApiError("The decoder prompt cannot be empty")
        lengths = Lengths(
            api=api,
            window_tokens=window,
            prompt_tokens=len(ids),
            output_tokens=asked,
            output_field=field,
            from_text=text is not None,
            characters=None if text is None else len(text),
            longest_token_chars=self.renderer.longest_token_chars,
        )
        return ids, check_lengths(self.version, lengths)

    def wishes(self, document: Mapping[str, Any], budget: int, *, given: bool) -> Wishes:
        """The sampling fields that decide how long an answer gets. Raises ``ApiError``."""
        least = self.integer(document, "min_tokens", 0) or 0
        if least < 0:
            text = f"min_tokens must be greater than or equal to 0, got {least}."
            raise validation_error(self.version, text, "min_tokens", least)
        if least > budget:
            text = f"min_tokens must be less than or equal to max_tokens={budget}, got {least}."
            raise validation_error(self.version, text, "min_tokens", least)
        temperature = document.get("temperature")
        if isinstance(temperature, int | float) and temperature < 0:
            text = f"temperature must be non-negative, got {float(temperature)}."
            raise validation_error(self.version, text, "temperature", float(temperature))
        stop = document.get("stop") or ()
        stops = (stop,) if isinstance(stop, str) else tuple(str(item) for item in stop if item)
        return Wishes(
            budget_tokens=budget,
            budget_given=given,
            min_tokens=least,
            ignore_eos=bool(document.get("ignore_eos", False)),
            stop=stops,
            include_stop=bool(document.get("include_stop_str_in_output", False)),
        )

    def choices(self, document: Mapping[str, Any]) -> int:
        """``n``. Raises ``ApiError``."""
        n = self.integer(document, "n", 1) or 1
        if n > MOST_SEQUENCES:
            text = f"n must be at most {MOST_SEQUENCES}, got {n}. To increase this limit, set the VLLM_MAX_N_SEQUENCES "
            raise ApiError(text + "environment variable.")  # of n, vLLM names no parameter
        if n < 1:
            raise ApiError(f"n must be at least 1, got {n}.")
        return n

    def rank_of(self, request: Request) -> int | None:
        """The engine asked for by ``X-data-parallel-rank``; no number asks for none. Raises ``ApiError``.

        The routes of chats, completions and messages read it, those of responses and of pooling do not (0.32).
        """
        try:
            asked = int(request.headers.get("x-data-parallel-rank", ""))
        except ValueError:
            return None
        size = self.options.data_parallel_size
        if not 0 <= asked < size:
            raise ApiError(f"data_parallel_rank {asked} is out of range [0, {size}).")
        return asked

    @staticmethod
    def request_id(request: Request, document: Mapping[str, Any], prefix: str) -> str:
        """vLLM's id of a request: header, then field, then random."""
        given = request.headers.get("x-request-id") or document.get("request_id")
        return f"{prefix}-{given or uuid.uuid4().hex}"

    async def run(self, job: Job) -> AsyncGenerator[Piece, None]:
        """Send a job through its engine and yield its tokens as they come. Closing it aborts what is unfinished."""
        suffix = uuid.uuid4().hex[:8]
        requests = [
            EngineRequest(
                request_id=f"{job.request_id}-{index}-{suffix}",
                prompt_token_ids=job.prompts[index // job.n],
                output_token_ids=answer.token_ids,
                finish_reason=answer.finish_reason,
                cache_key=job.cache_key,
                skip_cache=job.skip_cache,
            )
            for index, answer in enumerate(job.answers)
        ]
        numbers = {request.request_id: index for index, request in enumerate(requests)}
        said = [0] * len(requests)
        async with contextlib.aclosing(self.frontend.generate(requests, job.rank)) as outputs:
            async for output in outputs:
                index = numbers[output.request_id]
                text = job.answers[index].texts[said[index]] if output.token_id is not None else ""
                said[index] += 1
                yield Piece(index, text, output.token_id, output.finish_reason, output.cached_tokens)

    def cache_key(self, document: Mapping[str, Any], model: str) -> object:
        """What keeps equal tokens apart in the prefix cache: the LoRA adapter and the salt."""
        salt = document.get("cache_salt")
        if salt is not None and (not isinstance(salt, str) or not salt or len(salt) > 128 or set(salt) & set("@/\\\0")):
            raise ApiError("Parameter 'cache_salt' must be a non-empty string if provided.")
        adapter = model if any(model == name for name, _ in self.options.lora_modules) else None
        return None if salt is None and adapter is None else (salt, adapter)

    def write(self, prompts: Sequence[list[int]], n: int, wishes: Sequence[Wishes]) -> tuple[Answer, ...]:
        """Answers for every prompt and choice."""
        return tuple(
            self.writer.write(prompt, wish, index)
            for prompt, wish in zip(prompts, wishes, strict=True)
            for index in range(n)
        )
