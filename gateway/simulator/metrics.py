"""``/metrics`` with the names, labels and cadence of the chosen vLLM release (``v1/metrics/loggers.py``).

Every series changes only when an engine step ends, so a request just queued is invisible and an idle engine's values
stand still, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from gateway.simulator.engine import Counters, Engine, StepResult
from gateway.simulator.options import SimulatorOptions

_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_INTER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_PREEMPTIONS = (0, 1, 2, 5, 10, 20)


class EngineMetrics:
    """The registry of one simulated server."""

    def __init__(self, options: SimulatorOptions) -> None:
        self._options = options
        self._version = version = options.version()
        self.registry = CollectorRegistry(auto_describe=True)
        ProcessCollector(registry=self.registry)
        self._model = options.models[0]
        self._before = [Counters() for _ in range(options.data_parallel_size)]
        self._reasons = ["stop", "length", "abort"] + (["error"] if version.since(0, 13) else [])
        self._reasons += ["repetition"] if version.since(0, 17) else []
        self._running = self._gauge("num_requests_running", "Number of requests in model execution batches.")
        self._waiting = self._gauge("num_requests_waiting", "Number of requests waiting to be processed.")
        self._by_reason = (
            self._gauge("num_requests_waiting_by_reason", "Number of requests waiting, by reason.", "reason")
            if version.since(0, 20)
            else None
        )
        self._sleep = (
            self._gauge("engine_sleep_state", "Engine sleep state.", "sleep_state") if version.since(0, 11) else None
        )
        usage_names = (["kv_cache_usage_perc"] if version.since(0, 9) else []) + (
            [] if version.since(0, 11) else ["gpu_cache_usage_perc"]
        )
        self._usage = [self._gauge(name, "KV-cache usage. 1 means 100 percent usage.") for name in usage_names]
        stems = (["prefix_cache"] if version.since(0, 9) else []) + (
            [] if version.since(0, 11) else ["gpu_prefix_cache"]
        )
        self._queries = [self._counter(f"{stem}_queries", "Prefix cache queries, in queried tokens.") for stem in stems]
        self._hits = [self._counter(f"{stem}_hits", "Prefix cache hits, in cached tokens.") for stem in stems]
        self._preemptions = self._counter("num_preemptions", "Cumulative number of preemption from the engine.")
        self._prompt = self._counter("prompt_tokens", "Number of prefill tokens processed.")
        self._cached = (
            self._counter("prompt_tokens_cached", "Number of cached prompt tokens.") if version.since(0, 16) else None
        )
        self._generation = self._counter("generation_tokens", "Number of generation tokens processed.")
        self._success = self._counter("request_success", "Count of successfully processed requests.", "finished_reason")
        tokens = _token_buckets(options.max_model_len)
        self._iteration = self._histogram("iteration_tokens_total", "Tokens per engine step.", _ITERATION)
        self._prompt_tokens = self._histogram("request_prompt_tokens", "Number of prefill tokens processed.", tokens)
        self._output_tokens = self._histogram("request_generation_tokens", "Generation tokens processed.", tokens)
        self._first_token = self._histogram("time_to_first_token_seconds", "Time to first token.", _FIRST_TOKEN)
        gap_names = (["inter_token_latency_seconds"] if version.since(0, 10, 2) else []) + (
            [] if version.since(0, 16) else ["time_per_output_token_seconds"]
        )
        self._gaps = [self._histogram(name, "Inter-token latency.", _INTER_TOKEN) for name in gap_names]
        self._e2e = self._histogram("e2e_request_latency_seconds", "End to end request latency.", _LATENCY)
        self._queue = self._histogram("request_queue_time_seconds", "Time spent in WAITING phase.", _LATENCY)
        self._inference = self._histogram("request_inference_time_seconds", "Time in RUNNING phase.", _LATENCY)
        self._prefill = self._histogram("request_prefill_time_seconds", "Time in PREFILL phase.", _LATENCY)
        self._decode = self._histogram("request_decode_time_seconds", "Time in DECODE phase.", _LATENCY)
        self._per_request = (
            self._histogram("request_num_preemptions", "Times a request was preempted.", _PREEMPTIONS)
            if version.since(0, 30)
            else None
        )
        self._touch_all()
        self._cache_config()

    def render(self, names: Sequence[str] = (), awake: bool = True) -> bytes:
        """The page in the Prometheus text format; of some series only if ``names`` has any. An engine that sleeps was
        put to level 1."""
        if self._sleep is not None:
            for rank in range(self._options.data_parallel_size):
                for state in ("awake", "weights_offloaded", "discard_all"):
                    value = float(state == ("awake" if awake else "weights_offloaded"))
                    self._sleep.labels(self._model, str(rank), state).set(value)
        return generate_latest(self.registry.restricted_registry(names) if names else self.registry)

    def publish(self, rank: int, engine: Engine, result: StepResult) -> None:
        """Take over what a step did."""
        labels = (self._model, str(rank))
        gauges, counters, before = result.gauges, engine.counters, self._before[rank]
        self._running.labels(*labels).set(gauges.running)
        self._waiting.labels(*labels).set(gauges.waiting)
        if self._by_reason is not None:
            self._by_reason.labels(*labels, "capacity").set(gauges.waiting)
        for gauge in self._usage:
            gauge.labels(*labels).set(gauges.kv_usage_ratio)
        for counter in self._queries:
            counter.labels(*labels).inc(counters.prefix_queries_tokens - before.prefix_queries_tokens)
        for counter in self._hits:
            counter.labels(*labels).inc(counters.prefix_hits_tokens - before.prefix_hits_tokens)
        self._preemptions.labels(*labels).inc(counters.preemptions - before.preemptions)
        self._prompt.labels(*labels).inc(counters.prompt_tokens - before.prompt_tokens)
        if self._cached is not None:
            self._cached.labels(*labels).inc(counters.cached_prompt_tokens - before.cached_prompt_tokens)
        self._generation.labels(*labels).inc(counters.generation_tokens - before.generation_tokens)
        for reason, count in counters.success.items():
            if reason in self._reasons:
                self._success.labels(*labels, reason).inc(count - before.success[reason])
        self._observe(labels, result)
        self._before[rank] = Counters(
            preemptions=counters.preemptions,
            prompt_tokens=counters.prompt_tokens,
            cached_prompt_tokens=counters.cached_prompt_tokens,
            generation_tokens=counters.generation_tokens,
            prefix_queries_tokens=counters.prefix_queries_tokens,
            prefix_hits_tokens=counters.prefix_hits_tokens,
            success=dict(counters.success),
        )

    def _observe(self, labels: tuple[str, str], result: StepResult) -> None:
        if not result.idle:
            self._iteration.labels(*labels).observe(result.prefill_tokens + result.decode_tokens)
        for latency_s in result.first_token_latencies_s:
            self._first_token.labels(*labels).observe(latency_s)
        for gap_s in result.inter_token_latencies_s:
            for histogram in self._gaps:
                histogram.labels(*labels).observe(gap_s)
        for request in result.finished:
            self._prompt_tokens.labels(*labels).observe(request.prompt_tokens)
            self._output_tokens.labels(*labels).observe(request.output_tokens)
            self._e2e.labels(*labels).observe(request.finished_s - request.arrived_s)
            if self._per_request is not None:
                self._per_request.labels(*labels).observe(request.preemptions)
            if request.scheduled_s is None:
                continue
            self._queue.labels(*labels).observe(request.scheduled_s - request.arrived_s)
            self._inference.labels(*labels).observe(request.finished_s - request.scheduled_s)
            if request.first_token_s is not None:
                self._prefill.labels(*labels).observe(request.first_token_s - request.scheduled_s)
                self._decode.labels(*labels).observe(request.finished_s - request.first_token_s)

    def _touch_all(self) -> None:
        """All series exist from the start, at zero, for every engine."""
        for rank in range(self._options.data_parallel_size):
            labels = (self._model, str(rank))
            plain = [self._running, self._waiting, *self._usage, *self._queries, *self._hits, self._preemptions]
            plain += [self._prompt, self._generation, *([self._cached] if self._cached else [])]
            plain += [self._iteration, self._prompt_tokens, self._output_tokens, self._first_token, *self._gaps]
            plain += [self._e2e, self._queue, self._inference, self._prefill, self._decode]
            plain += [self._per_request] if self._per_request else []
            for metric in plain:
                metric.labels(*labels)
            for reason in self._reasons:
                self._success.labels(*labels, reason)
            if self._by_reason is not None:
                self._by_reason.labels(*labels, "capacity")
                self._by_reason.labels(*labels, "deferred")

    def _cache_config(self) -> None:
        """``vllm:cache_config_info``: the block count is the sum over engines, stamped on each of them."""
        options, version = self._options, self._version
        total = str(options.num_gpu_blocks * options.data_parallel_size)
        labels = {
            "block_size": str(options.block_size),
            "cache_dtype": "auto",
            "enable_prefix_caching": str(options.enable_prefix_caching),
            "gpu_memory_utilization": "0.92" if version.since(0, 20) else "0.9",
            "is_attention_free": "False",
            "num_cpu_blocks": "None",
            "num_gpu_blocks": total if version.since(0, 9) else "None",
            "num_gpu_blocks_override": str(options.num_gpu_blocks),
            "prefix_caching_hash_algo": "sha256" if version.since(0, 11) else "builtin",
            "sliding_window": "None",
            "swap_space": "4",
        }
        if version.since(0, 24):
            window_blocks = -(-options.max_model_len // options.block_size)
            concurrency = options.num_gpu_blocks / window_blocks  # the null block is counted in
            labels["kv_cache_size_tokens"] = str(int(concurrency * options.max_model_len))
            labels["kv_cache_max_concurrency"] = str(concurrency)
            del labels["swap_space"]
        if version.since(0, 31):
            labels["effective_attention_block_size"] = str(options.block_size)
        info = Gauge(
            "vllm:cache_config_info",
            "Information of the LLMEngine CacheConfig",
            labelnames=[*labels, "engine"],
            registry=self.registry,
        )
        for rank in range(options.data_parallel_size):
            info.labels(**labels, engine=str(rank)).set(1)

    def _gauge(self, name: str, text: str, *extra: str) -> Gauge:
        return Gauge(f"vllm:{name}", text, labelnames=["model_name", "engine", *extra], registry=self.registry)

    def _counter(self, name: str, text: str, *extra: str) -> Counter:
        return Counter(f"vllm:{name}", text, labelnames=["model_name", "engine", *extra], registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(
            f"vllm:{name}", text, labelnames=["model_name", "engine"], buckets=buckets, registry=self.registry
        )


def _token_buckets(most_tokens: int) -> list[float]:
    """1, 2, 5, 10, … up to the window, as vLLM builds them."""
    buckets: list[float] = []
    power = 1
    while True:
        for factor in (1, 2, 5):
            if factor * power > most_tokens:
                return buckets or [1.0]
            buckets.append(float(factor * power))
        power *= 10
