"""What passes between the rooms: small, frozen and typed. Units stand in names.

``Ask`` leaves ``api``; ``Count`` leaves ``tokens``; ``Verdict`` leaves ``guard``; ``BackendView`` leaves ``fleet``;
``Decision`` leaves ``routing``. No other shape crosses a room's door.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from gateway.block_keys import PromptBlocks


class Dialect(StrEnum):
    """The wire format a client speaks; it decides how bodies are read and how errors are worded."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    POOLING = "pooling"  # embeddings, pooling, score, rerank, classify: prompts go in, no tokens come out
    OTHER = "other"


class CountKind(StrEnum):
    """How far a count may be trusted. An estimate never rejects; an upper bound may accept but not reject."""

    EXACT = "exact"
    UPPER_BOUND = "upper_bound"
    ESTIMATE = "estimate"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation to be rendered by the model's chat template, as the client sent it (not yet normalised).

    ``from_messages``: it was converted from Anthropic's format, where vLLM asks the template about two things: whether
    system messages must all be merged into the first, and which effort a thinking that is switched off stands for.
    ``responses``: the body of a Responses request, for renderers that read its items instead of messages (gpt-oss).
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    documents: list[Any] | None = None
    reasoning_effort: str | None = None
    mm_processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    media_io_kwargs: Mapping[str, Any] = field(default_factory=dict)
    from_messages: bool = False
    responses: Mapping[str, Any] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class TextPrompts:
    """One or more raw texts; each is its own prompt for the engine.

    ``approximate``: the engine's prompts are made of these texts in a way not known here (pairs of a reranker), so that
    their count is an estimate.
    """

    texts: tuple[str, ...]
    add_special_tokens: bool = True
    approximate: bool = False


@dataclass(frozen=True, slots=True)
class TokenPrompts:
    """One or more ready token id lists, of which only the lengths matter here."""

    lengths: tuple[int, ...]


Prompt = ChatPrompt | TextPrompts | TokenPrompts


@dataclass(frozen=True, slots=True)
class Ask:
    """One request as its dialect's parser understood it.

    ``output_tokens`` is the output budget the client asked for (``None``: the field is absent, null or ≤ 0) and
    ``output_field`` the body field that carries it upstream. ``document`` is the parsed body and must not be changed;
    ``body`` are the client's own bytes, relayed untouched unless a decision changes the request. ``min_output_tokens``
    is the least output the client insists on (vLLM's ``min_tokens``). ``drop_fields`` are body fields that would be
    refused upstream and mean nothing (a budget ≤ 0). ``continuous_usage``: usage was asked for in every chunk.
    ``counted``: its prompt is to be counted, if only by an estimate (``prompt`` is ``None`` where it cannot be known
    here what will be rendered), and held against the usage in the answer.
    """

    dialect: Dialect
    path: str
    model: str
    prompt: Prompt | None
    body: bytes
    document: Mapping[str, Any]
    output_tokens: int | None = None
    output_field: str = "max_tokens"
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    truncate_prompt_tokens: int | None = None
    has_media: bool = False
    min_output_tokens: int = 0
    drop_fields: tuple[str, ...] = ()
    continuous_usage: bool = False
    counted: bool = True


@dataclass(frozen=True, slots=True)
class Count:
    """Prompt tokens of a request.

    ``tokens`` is the longest single prompt (what must fit a window); ``total_tokens`` the sum over all prompts of the
    request (what ``usage.prompt_tokens`` will say). ``source`` names who counted: ``local``, ``backend``, ``estimate``,
    ``given`` (token ids). ``chain`` holds ``(hash of everything up to here, tokens up to here)`` for prefix matching,
    ``blocks`` the keys of its KV blocks where backends report theirs.
    """

    tokens: int
    total_tokens: int
    kind: CountKind
    source: str
    chain: tuple[tuple[int, int], ...] = ()
    blocks: PromptBlocks | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Offer:
    """A backend whose window holds the request, and the output budget it would get there.

    ``output_tokens`` is ``None`` when nothing bounds it but the window itself (the body is then left as it is).
    """

    backend: str
    window_tokens: int
    output_tokens: int | None
    clamped: bool


@dataclass(frozen=True, slots=True)
class Fits:
    """The request fits at least one window. ``offers`` are in order of preference."""

    offers: tuple[Offer, ...]


@dataclass(frozen=True, slots=True)
class Overflow:
    """Prompt plus the smallest acceptable output exceed every window.

    ``limit_tokens`` is the most prompt tokens the largest window would take (window − output floor).
    """

    prompt_tokens: int
    output_tokens: int
    window_tokens: int
    limit_tokens: int


Verdict = Fits | Overflow


class Health(StrEnum):
    """What is known of a backend."""

    UNKNOWN = "unknown"
    UP = "up"
    DOWN = "down"


class Condition(StrEnum):
    """How a backend stands, for people. What it means for placing is said by ``Health`` and ``accepting``."""

    UNKNOWN = "unknown"  # not looked at yet
    UP = "up"
    WARMING = "warming"  # back, and given more by and by
    OVERLOADED = "overloaded"  # its own queue is full, it said; it rests a moment
    EJECTED = "ejected"  # far slower than its peers, or failing far more often; it rests
    FAILING = "failing"  # its breaker is open, or tries one request
    DRAINING = "draining"  # an operator's wish
    STANDBY = "standby"  # the same server as another backend that is up
    ASLEEP = "asleep"  # its engine sleeps, or generation is paused
    STARTING = "starting"  # there, but not ready; or not there yet
    DOWN = "down"


class Shared(Protocol):
    """What is known of prompt beginnings that are held by requests in flight."""

    def shared_links(self, chain: tuple[tuple[int, int], ...], guess: int = 0) -> int:
        """How many links at the beginning of ``chain`` are held now: their blocks are not needed once more. ``guess``:
        what it may be, to find it sooner."""

    def shared_tokens(self, chain: tuple[tuple[int, int], ...]) -> int:
        """How many tokens at the beginning of ``chain`` are held now."""


@dataclass(frozen=True, slots=True)
class KvView:
    """KV cache of one engine as its ledger sees it now.

    ``capacity_blocks`` excludes vLLM's null block. ``used_blocks`` is foreign use plus our footprints.
    ``reserved_blocks`` adds what our running requests are still expected to grow by. ``engine_capacity_blocks`` bounds
    a single request. ``age_s`` is the age of the observation the ledger last reconciled with. ``held`` tells which
    prompt beginnings requests of ours hold there; unlike the rest it is not frozen, but always as of now.
    """

    capacity_blocks: int
    engine_capacity_blocks: int
    block_size_tokens: int
    used_blocks: int
    reserved_blocks: int
    age_s: float
    held: Shared | None = field(default=None, compare=False)

    @property
    def free_blocks(self) -> int:
        """Blocks that could be allocated now, before any expected growth."""
        return max(0, self.capacity_blocks - self.used_blocks)


@dataclass(frozen=True, slots=True)
class LoadView:
    """What changes of a backend all the time, in the words of ``BackendView`` and ``KvView``: the rest stands."""

    name: str
    in_flight: int
    pending_prompt_tokens: int
    reserved_blocks: int


@dataclass(frozen=True, slots=True)
class BackendView:
    """A frozen picture of one backend, for the pure rooms: of one of its engines where the gateway chooses among them,
    and else of the engine that its server would send the next request to, one of ``engines``.

    ``kv`` is ``None`` while the KV cache is unknown (no metrics); then placement goes by requests in flight.
    ``running``/``waiting`` are vLLM's own gauges, ``None`` when unseen; ``in_flight`` are our requests there, and
    ``pending_prompt_tokens`` the prompts of those that have not begun to answer, less what was cached of them.
    ``accepting`` is false while nothing may be sent for a moment, ``trial`` says that one request may go there and then
    none until it was looked at again (a recovering backend is tried, or another engine may be next), ``draining`` that
    an operator wants no more there.

    ``prefill_s`` and ``output_s`` are its learned seconds a prompt token and an output token, ``None`` before that.
    ``first_s`` it takes until a first byte with ``first_tokens`` to be worked on, which are none where ``prefill_s`` is
    known. ``trust``: how much of all this is to be believed, 1 unless it has got no requests for a while.
    ``share``: work it is to get in comparison to others; ``warmth``: the part of its cache that may be filled, while it
    comes back. ``epoch`` is another one when its process is; ``caches`` says that it keeps prompt prefixes. ``loras``
    are the LoRA adapters at work there, ``lora_slots`` how many there can be.
    """

    name: str
    url: str
    health: Health
    windows: Mapping[str, int]
    in_flight: int
    kv: KvView | None = None
    running: int | None = None
    waiting: int | None = None
    accepting: bool = True
    draining: bool = False
    pending_prompt_tokens: int = 0
    trial: bool = False
    prefill_s: float | None = None
    output_s: float | None = None
    share: float = 1.0
    epoch: int = 0
    caches: bool = True
    loras: frozenset[str] = frozenset()
    lora_slots: int | None = None
    engines: int = 1
    condition: Condition = Condition.UP
    warmth: float = 1.0
    first_s: float | None = None
    first_tokens: float = 0.0
    trust: float = 1.0


def footprint_blocks(prompt_tokens: int, output_tokens: int, n: int, block_size_tokens: int) -> int:
    """KV blocks held by ``n`` sequences of ``output_tokens`` each after one prompt.

    The prompt's full blocks are held once, its last, partial block and all that follows once a sequence: so shares
    vLLM's prefix cache, which is on by default since V1 (``v1/core/kv_cache_manager.py``).
    """
    if n <= 1:
        return -(-(prompt_tokens + output_tokens) // block_size_tokens)
    full, rest = divmod(prompt_tokens, block_size_tokens)
    return full + n * -(-(rest + output_tokens) // block_size_tokens)


@dataclass(frozen=True, slots=True)
class Need:
    """What placing must find room for. ``output_tokens`` is the expected output of one sequence, not its budget."""

    prompt_tokens: int
    output_tokens: int
    n: int = 1

    def blocks(self, block_size_tokens: int) -> int:
        """KV blocks when the expected output has been generated."""
        return footprint_blocks(self.prompt_tokens, self.output_tokens, self.n, block_size_tokens)


@dataclass(frozen=True, slots=True)
class Wish:
    """How a request wants to be queued and placed, beside its size.

    ``rank``: its priority class, 0 the first. ``flow``: whose share of that class it takes. ``session``: a hint which
    requests belong together, empty if there is none. ``chain``, ``blocks``: as in ``Count``, for prefix matching.
    ``adapter``: its model is a LoRA adapter. ``whole_budget``: the answer will take all of its output budget (vLLM's
    ``ignore_eos``). ``streamed``: its first byte tells that its prompt is done. ``engine``: the data-parallel rank its
    client asks for; ``heeded``: vLLM obeys who asks for one, in requests of this kind.
    """

    rank: int = 1
    flow: str = ""
    session: str = ""
    chain: tuple[tuple[int, int], ...] = ()
    blocks: PromptBlocks | None = None
    adapter: bool = False
    whole_budget: bool = False
    streamed: bool = False
    engine: int | None = None
    heeded: bool = True


@dataclass(frozen=True, slots=True)
class Group:
    """Offers of one window and one budget, neighbours in the order of preference, and what the request needs there."""

    offers: tuple[Offer, ...]
    need: Need

    @property
    def window_tokens(self) -> int:
        """The window of each of them."""
        return self.offers[0].window_tokens


@dataclass(frozen=True, slots=True)
class Waiter:
    """A request in the queue: its offers come from ``guard``, in order of preference, as ``groups``.

    ``rank`` is its priority class, 0 the first; no class is served while one before it could be. ``flow`` is whose
    share of a class it takes: flows of a class share what is served in tokens, and within a flow the order is
    ``sequence``, that of arrival. ``tag``: it was placed before, on a backend that failed it, and this was its place.
    """

    sequence: int
    arrived_s: float
    deadline_s: float
    groups: tuple[Group, ...]
    excluded: frozenset[str] = frozenset()
    model: str = ""
    rank: int = 1
    flow: str = ""
    tag: float | None = None
    session: str = ""
    chain: tuple[tuple[int, int], ...] = ()
    blocks: PromptBlocks | None = None
    adapter: bool = False
    streamed: bool = False
    engine: int | None = None
    heeded: bool = True

    @property
    def offers(self) -> tuple[Offer, ...]:
        """All offers in order of preference."""
        return tuple(offer for group in self.groups for offer in group.offers)

    def need(self, backend: str) -> Need:
        """What it needs on a backend it has an offer of. Raises ``KeyError``."""
        for group in self.groups:
            if any(offer.backend == backend for offer in group.offers):
                return group.need
        raise KeyError(backend)


@dataclass(frozen=True, slots=True)
class Placed:
    """Send it there now. ``tag`` was its place in the queue, to be had again if the backend fails it;
    ``matched_tokens`` of its prompt should be in the cache there. ``need`` is what it takes there, if nothing of it is
    shared; ``chain``: the beginnings of its prompt by which the ledger can tell what is. ``own_tokens`` of its prompt
    were held there by nobody else."""

    sequence: int
    offer: Offer
    need: Need
    tag: float = 0.0
    matched_tokens: int = 0
    chain: tuple[tuple[int, int], ...] = ()
    own_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Refused:
    """It will not be placed: ``reason`` is ``timeout``, ``kept_out`` (a timeout, too, but it would have fitted, were
    nothing kept for others), ``no_backend`` or ``too_large``."""

    sequence: int
    reason: str


Decision = Placed | Refused


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model's chat template takes, as far as it is known; what is not known is taken for granted.

    ``takes_…``: system messages at all, and elsewhere than first; developer messages; the same role twice in a row; an
    assistant's message first; a user's right after a tool's result; no user's message at all; calls without results and
    results without calls. ``nine_character_ids``: ids of tool calls must have that length (Mistral).
    ``vllm_version`` is the oldest that serves the model: major and minor.
    """

    vllm_version: tuple[int, int] | None = None
    takes_system: bool = True
    takes_late_system: bool = True
    takes_developer: bool = True
    takes_repeated_roles: bool = True
    takes_assistant_first: bool = True
    takes_user_after_tool: bool = True
    takes_no_user: bool = True
    takes_open_calls: bool = True
    takes_orphan_results: bool = True
    nine_character_ids: bool = False
