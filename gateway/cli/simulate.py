"""``kvgate simulate``: one simulated vLLM server."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gateway.cli.listening import CannotListen, listen, url_of


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options; names and defaults are those of ``vllm serve`` where it has them."""
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    add("--port", type=int, default=8000, help="port to listen on, 0 for a free one (default %(default)s)")
    add(
        "--model",
        "--served-model-name",
        dest="models",
        action="append",
        metavar="NAME",
        help="name to serve; repeat for aliases, the first labels the metrics (default simulated)",
    )
    add(
        "--tokenizer",
        type=Path,
        metavar="FOLDER",
        help="folder with tokenizer.json and a chat template (default: Qwen3's, made on first use)",
    )
    add("--max-model-len", type=_tokens, default=32768, help="window in tokens; 32k = 32000, 32K = 32768 (%(default)s)")
    add("--num-gpu-blocks", type=int, default=4096, help="KV blocks of each engine, null block included (%(default)s)")
    add("--block-size", type=int, default=16, help="tokens in a KV block (default %(default)s)")
    add("--max-num-seqs", type=int, default=256, help="most sequences running at once (default %(default)s)")
    add("--max-num-batched-tokens", type=int, default=2048, help="most tokens in one step (default %(default)s)")
    add("--vllm-version", default="0.32.0", help="release to imitate, 0.8.5 or later (default %(default)s)")
    add("--prefill-tokens-per-s", type=float, default=20000.0, help="prompt tokens an engine computes a second (20000)")
    add("--decode-tokens-per-s", type=float, default=50.0, help="output tokens a second each sequence sees (50)")
    add("--time-scale", type=float, default=1.0, help="how many times faster than its rates it runs (default 1)")
    add(
        "--no-enable-prefix-caching",
        dest="enable_prefix_caching",
        action="store_false",
        help="compute every prompt whole",
    )
    add("--enable-prompt-tokens-details", action="store_true", help="tell cached tokens in usage")
    add("--api-key", dest="api_keys", action="append", metavar="KEY", help="key that /v1 asks for; repeat for several")
    add("--data-parallel-size", type=int, default=1, help="engines behind this server (default %(default)s)")
    add("--api-server-count", type=int, default=1, help="API servers that share the engines (default %(default)s)")
    add("--lora-modules", nargs="+", default=[], metavar="NAME=PATH", help="LoRA adapters to list and accept")
    add(
        "--mean-output-tokens", type=int, default=128, help="mean length of an answer that ends by itself (%(default)s)"
    )
    add(
        "--eos",
        choices=("unbounded", "always", "never"),
        default="unbounded",
        help="when an answer may end by itself: unbounded: only if the request names no budget (default)",
    )
    add(
        "--fault",
        metavar="KIND[=VALUE][:TIMES]",
        help="misbehave: die-before-headers, die-after-chunks=N, stall-after-chunks=N, garbage, status=CODE, "
        "slow-headers=S, overloaded=N, asleep, scaling, unhealthy, odd metrics of many kinds (docs/cli.md); also by "
        "POST /simulator/fault",
    )
    add("--kv-events-config", metavar="JSON", help="publish KV events, as vllm serve does (needs kvgate[kv-events])")
    add("--seed", type=int, default=0, help="changes what the model says (default %(default)s)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Serve until Ctrl-C. 2 for options that make no sense."""
    from gateway.exceptions import GatewayError
    from gateway.simulator.faults import Fault
    from gateway.simulator.options import SimulatorOptions
    from gateway.simulator.server import create_app, uvicorn_server

    fields: dict[str, Any] = {
        key: value for key, value in vars(options).items() if key in SimulatorOptions.__dataclass_fields__
    }
    if options.kv_events_config and not all(find_spec(name) for name in ("msgspec", "zmq")):
        print("error: --kv-events-config needs more packages: pip install 'kvgate[kv-events]'", file=sys.stderr)
        return 2
    try:
        fields["lora_modules"] = tuple(_adapter(item) for item in options.lora_modules)
        fields["models"] = tuple(options.models or ("simulated",))
        fields["api_keys"] = tuple(options.api_keys or ())
        Fault.parse(options.fault)
        simulator_options = SimulatorOptions(**fields)
        capacity = (options.num_gpu_blocks - 1) * options.block_size
        if capacity < options.max_model_len:
            print(
                f"warning: the KV cache holds {capacity} tokens, less than one request of {options.max_model_len}; "
                "such a request will wait for ever, as in vLLM with --num-gpu-blocks-override",
                file=sys.stderr,
            )
        if options.tokenizer is None:
            print("preparing the tokenizer (a few seconds the first time) ...", file=sys.stderr, flush=True)
        app = create_app(simulator_options)
        app.service.bind()
    except (GatewayError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    server = uvicorn_server(app, host=options.host, port=options.port)
    try:
        listener = listen(options.host, options.port)
    except CannotListen as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    url = url_of(options.host, listener.getsockname()[1])
    names = ", ".join(simulator_options.models)
    print(
        f"simulated vLLM {simulator_options.vllm_version} serves {names} on {url} "
        f"(window {options.max_model_len} tokens, {options.num_gpu_blocks} blocks of {options.block_size})",
        flush=True,
    )
    server.run(sockets=[listener])
    return 0 if server.started else 1


def _adapter(item: str) -> tuple[str, str]:
    name, equals, path = item.partition("=")
    if not (name and equals and path):
        raise ValueError(f"--lora-modules takes NAME=PATH, not {item!r}")
    return name, path


def _tokens(text: str) -> int:
    """``32768``, ``32k`` or ``32K``, as vLLM reads them. Raises ``ValueError``, which argparse reports."""
    factor = {"k": 1000, "K": 1024, "m": 10**6, "M": 1024**2}.get(text[-1:], 1)
    return int(float(text[:-1]) * factor) if factor > 1 else int(text)
