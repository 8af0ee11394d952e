"""The paths clients write, and the ones they mean."""

from __future__ import annotations

import re

from gateway.types import Dialect

# First segments that exist only under /v1; the others vLLM serves without it (/tokenize, /score, /health ...).
_UNDER_V1 = frozenset(
    {
        "audio",
        "chat",
        "completions",
        "embeddings",
        "files",
        "images",
        "load_lora_adapter",
        "messages",
        "models",
        "realtime",
        "responses",
        "unload_lora_adapter",
    }
)
_SLASHES = re.compile(r"/{2,}")
_DIALECTS = {
    "/v1/chat/completions": Dialect.CHAT,
    "/v1/completions": Dialect.COMPLETIONS,
    "/v1/embeddings": Dialect.POOLING,
    "/pooling": Dialect.POOLING,
    "/classify": Dialect.POOLING,
    "/score": Dialect.POOLING,
    "/v1/score": Dialect.POOLING,
    "/rerank": Dialect.POOLING,
    "/v1/rerank": Dialect.POOLING,
    "/v2/rerank": Dialect.POOLING,
}


def normalise(path: str) -> str:
    """The path meant: without doubled or trailing slashes (Open WebUI asks for ``//models``), with ``/v1`` where it was
    forgotten, and with it only once (a base URL that ends in ``/v1`` under a client that adds it).
    """
    clean = "/" + _SLASHES.sub("/", path).strip("/")
    while clean == "/v1/v1" or clean.startswith("/v1/v1/"):
        clean = clean.removeprefix("/v1")
    return "/v1" + clean if clean.split("/", 2)[1] in _UNDER_V1 else clean


def dialect_of(path: str) -> Dialect:
    """The dialect spoken at a normalised path."""
    if path in _DIALECTS:
        return _DIALECTS[path]
    for prefix, dialect in (("/v1/responses", Dialect.RESPONSES), ("/v1/messages", Dialect.MESSAGES)):
        if path == prefix or path.startswith(prefix + "/"):
            return dialect
    return Dialect.OTHER
