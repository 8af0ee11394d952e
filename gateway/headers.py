"""The headers of an exchange: what the backend gets of the client's, and what the client is told of what was done."""

from __future__ import annotations

from gateway.fitting import trim_headers
from gateway.relay.client import Scope
from gateway.relay.exchange import HOP_BY_HOP
from gateway.relay.lease import Lease
from gateway.trace import Trace, counted, repaired
from gateway.types import Ask

# What a client says to us and not to the backend. Its credentials are ours to check; bodies are relayed uncompressed.
NOT_FORWARDED = HOP_BY_HOP | {
    "host",
    "content-length",
    "authorization",
    "x-api-key",
    "cookie",
    "accept-encoding",
    "expect",
}


def forwarded(scope: Scope, lease: Lease, trace: Trace) -> dict[str, str]:
    """The client's headers as the backend gets them, with the backend's own credentials."""
    headers = {
        name: _text(value)
        for name, value in ((raw.decode("latin-1"), value) for raw, value in scope["headers"])
        if name not in NOT_FORWARDED and not name.startswith("x-kvgate-")
    }
    headers["x-request-id"] = trace.request_id
    headers["accept-encoding"] = "identity"
    if lease.backend.priority_scheduling:
        headers["x-vllm-priority"] = str(lease.rank - 1)  # 0.32; lower is sooner, as with us
    if lease.backend.rank is not None:
        headers["x-data-parallel-rank"] = str(lease.backend.rank)
    if lease.backend.api_key:
        headers["authorization"] = f"Bearer {lease.backend.api_key.get_secret_value()}"
    return headers


def explained(trace: Trace, ask: Ask, lease: Lease) -> list[tuple[str, str]]:
    """The headers that tell the client what was done. Documented in docs/headers.md."""
    offer = lease.offer
    headers = [
        ("x-kvgate-backend", lease.backend.name),
        ("x-kvgate-queue-wait-ms", str(round(trace.queue_wait_s * 1000))),
    ]
    if lease.backend.rank is not None:
        headers.append(("x-kvgate-engine", str(lease.backend.rank)))
    if trace.hedge:
        headers.append(("x-kvgate-hedge", trace.hedge))
    if trace.count is not None:
        headers += counted(trace.count)
        headers.append(("x-kvgate-window", str(offer.window_tokens)))
        if offer.output_tokens:
            headers.append(("x-kvgate-output-tokens", str(offer.output_tokens)))
        if offer.clamped and ask.output_tokens is not None:
            headers.append(("x-kvgate-clamped-from", str(ask.output_tokens)))
    if trace.fitted is not None:
        headers += trim_headers(trace.fitted)
    return headers + repaired(trace.repairs)


def _text(value: bytes) -> str:
    """A header's value such that aiohttp, which writes UTF-8, sends the same bytes again if they are UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")
