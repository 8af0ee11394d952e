"""A stream of events as the relay sees it: what to pass on, how many tokens came, what usage it told, its end."""

from __future__ import annotations

from gateway.exceptions import GatewayError
from gateway.relay.repair import StreamRepair
from gateway.relay.sse import (
    EventSplitter,
    cached_tokens_of,
    count_events,
    has_done,
    output_tokens_of,
    prompt_tokens_of,
    strip_usage,
)
from gateway.types import Ask, Dialect


class EventStream:
    """Takes a backend's chunks and gives what goes to the client: whole events, less the usage it did not ask for."""

    __slots__ = (
        "_ask",
        "_done",
        "_marked",
        "_new",
        "_repair",
        "_splitter",
        "cached_tokens",
        "output_tokens",
        "prompt_tokens",
    )

    def __init__(self, ask: Ask, repair: StreamRepair | None = None) -> None:
        self._ask = ask
        self._repair = repair or StreamRepair(ask.dialect)
        self._splitter = EventSplitter()
        # Only these dialects end with a mark that can be missed; of others the end of the body is the end.
        self._marked = ask.dialect in (Dialect.CHAT, Dialect.COMPLETIONS)
        self._done = False
        self._new = 0
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.cached_tokens: int | None = None

    @property
    def finished(self) -> bool:
        """Whether the stream came to its own end, ``[DONE]``, or only lacks that."""
        return self._done or not self._marked or self._repair.finished

    def early_error(self, chunk: bytes) -> GatewayError | None:
        """The error that a stream, of which ``chunk`` is the first, begins with, if a status tells it better."""
        return self._repair.early_error(chunk)

    def feed(self, chunk: bytes) -> bytes:
        """The whole events that ``chunk`` completes, as the client should get them; may be empty."""
        data = self._splitter.feed(chunk)
        return self._passed(data) if data else b""

    def close(self) -> bytes:
        """What is left when the body has ended: an event without its empty line, or nothing."""
        rest = self._splitter.flush()
        data = self._passed(rest) if rest else b""
        if self._marked and not self._done and self._repair.finished:
            data += self._repair.end()
        return data

    def take_new(self) -> int:
        """Events with data since the last call; of vLLM each stands for a token or more."""
        new, self._new = self._new, 0
        return new

    def _passed(self, data: bytes) -> bytes:
        self._new += count_events(data)
        if not self._done and has_done(data):
            self._done = True
        ask = self._ask
        data, usage = strip_usage(
            data, at_end=ask.include_usage, in_every_chunk=ask.continuous_usage or not self._marked
        )
        if usage is not None:  # the last event of an Anthropic stream tells output tokens only
            prompt_tokens, output_tokens = prompt_tokens_of(usage), output_tokens_of(usage)
            self.prompt_tokens = self.prompt_tokens if prompt_tokens is None else prompt_tokens
            self.output_tokens = self.output_tokens if output_tokens is None else output_tokens
            cached_tokens = cached_tokens_of(usage)
            self.cached_tokens = self.cached_tokens if cached_tokens is None else cached_tokens
        return self._repair.passed(data, self.output_tokens) if data else data
