"""The count of a request: from the best source that has one, with its kind, and audited by what backends report.

Sources, best first: ``given`` (token ids), ``local`` (tokenizer and template here), a backend's ``render`` endpoint,
its ``count_tokens`` (Anthropic's requests only), its ``tokenize``, and the ``estimate``. A failure of one never reaches
the client; the next is asked.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from gateway.block_keys import BlockWish, PromptBlocks, block_keys, id_bytes, root_key
from gateway.config import CountingSettings, ModelSettings
from gateway.tokens.backend import Backends, Post
from gateway.tokens.clock import BackendClock
from gateway.tokens.errors import CannotCount, CannotLoad
from gateway.tokens.estimate import Estimator, Size, size_of
from gateway.tokens.growing import Counted
from gateway.tokens.limits import refuse_absurd
from gateway.tokens.loading import WAIT_S, Loading
from gateway.tokens.local import LocalCounter, TemplateOptions, load
from gateway.tokens.media.errors import UnknownMedia
from gateway.tokens.media.families import ProcessorKwargs
from gateway.tokens.media.prompt import find_items
from gateway.tokens.media.sizes import MediaSize
from gateway.tokens.probe import Comparison, probes_for
from gateway.types import Ask, ChatPrompt, Count, CountKind, TextPrompts, TokenPrompts

if TYPE_CHECKING:
    from gateway.tokens.media.fetch import MediaFetcher

log = logging.getLogger("kvgate.tokens")

# Rendering and encoding this much takes less than a millisecond; more is counted in a thread.
INLINE_BYTES = 20_000
# Finding out what of a request is known takes up to 1 ms a MB.
INLINE_KNOWN_BYTES = 1_000_000
# Encoding this much takes 4 ms at most, without the GIL: the next render can wait for so long, and a hop is saved.
ONE_HOP_BYTES = 500_000
_ENCODE_THREADS = 4
_SWITCH_INTERVAL_S = 0.001
_PLAIN = ModelSettings()
Chain = tuple[tuple[int, int], ...]
# What is distrusted when images are counted wrongly: their formulas, not the tokenizer.
LOCAL_MEDIA = "local-media"

# Ways to have a backend count, best first. The first two run the code that serves requests.
REMOTE = ("render", "count_tokens", "tokenize")
# Sources that can lose their trust.
SOURCES = ("local", LOCAL_MEDIA, *REMOTE)

TrustNote = Callable[[str, str, str], None]
"""Told of a model, a source and ``lost`` or ``regained``."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What counting needs to know of a served name.

    ``root`` is the model card's (path or hub id); for a LoRA card the root of its parent. ``backends`` are base URLs
    that serve the name and are up, any of which may be asked to count; ``api_keys`` maps URLs to bearer keys.
    ``adapter`` is the LoRA adapter that is asked for, which is counted as its base but has KV blocks of its own.
    """

    name: str
    root: str
    backends: tuple[str, ...] = ()
    api_keys: Mapping[str, str] = field(default_factory=dict)
    vllm_version: str | None = None
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class MeasuredCount(Count):
    """A count, and what the audit needs when the backend's usage comes back.

    ``size`` teaches the estimate; ``audited`` is false where a difference is no mistake of the source: media, whose
    tokens depend on the server's processor, and prompts the server truncates to a window not known here. ``trust`` is
    what a difference speaks against, if not the source as a whole: ``local-media``, the formulas for images.
    """

    size: Size | None = None
    audited: bool = True
    trust: str = ""


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A prompt's tokens. ``strings`` names them as the vocabulary does; it blocks."""

    tokens: list[int]
    strings: Callable[[], list[str]]


@dataclass(frozen=True, slots=True)
class SourceView:
    """How a model is counted now. ``wrong`` are audited exact counts that usage contradicted, by source."""

    model: str
    source: str
    reason: str
    wrong: Mapping[str, int]
    tokens_per_byte: float


@dataclass(slots=True)
class _State:
    """What was learned of one served name, as long as it is the same model on the same vLLM."""

    root: str
    vllm_version: str | None
    estimator: Estimator = field(default_factory=Estimator)
    wrong: dict[str, int] = field(default_factory=dict)
    distrusted: dict[str, str] = field(default_factory=dict)
    source: str = "none"
    reason: str = "no request yet"


class Counter:
    """Counts requests. ``post`` reaches the backends: this room has no HTTP client of its own. ``block_sizes``: of the
    KV blocks by which prompts will be looked up; where there are any, counts come with their keys."""

    def __init__(
        self,
        settings: CountingSettings,
        models: Mapping[str, ModelSettings],
        post: Post,
        note: TrustNote = lambda model, source, change: None,
        block_sizes: Callable[[], tuple[int, ...]] = lambda: (),
    ) -> None:
        self._settings = settings
        self._models = models
        self._backends = Backends(post, settings.backend_timeout_s)
        self._note = note
        self._block_sizes = block_sizes
        self._states: dict[str, _State] = {}
        self._fetcher: MediaFetcher | None = None
        self._loading = Loading(self._load)
        # A thread that renders keeps the GIL for so long before it lets the loop go on; Python's default is 5 ms.
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        # Rendering holds the GIL, so two renders at once would only keep the loop waiting twice as long; encoding does
        # not, and one huge text must not hold up the others.
        self._renders = ThreadPoolExecutor(1, thread_name_prefix="render")
        self._encodes = ThreadPoolExecutor(_ENCODE_THREADS, thread_name_prefix="encode")

    async def count(self, ask: Ask, model: ServedModel) -> Count:
        """Count the prompt of ``ask``. Never raises for what a client sent."""
        state = self._state(model)
        prompt = ask.prompt
        if prompt is None:
            size = Size((len(ask.body),))
            return self._counted(state.estimator.estimate(size), CountKind.ESTIMATE, "estimate", ask, size)
        if isinstance(prompt, TokenPrompts):
            given = self._counted(prompt.lengths, CountKind.EXACT, "given", ask, None)
            return given if ask.truncate_prompt_tokens is not None else _with_blocks(given, ask, self._wish(ask, model))
        chain: Chain = ()
        blocks: PromptBlocks | None = None
        try:
            if ask.has_media and isinstance(prompt, ChatPrompt):
                lengths = await self._count_media(prompt, model, state)
            else:
                lengths, chain, blocks = await self._count_locally(prompt, ask, model, state)
        except (CannotCount, CannotLoad) as error:
            log.debug("%s: not counted locally: %s", model.name, error)
            return await self._count_elsewhere(ask, prompt, model, state, error)
        self._chose(model.name, state, "local", "")
        if self._is_never_cut(prompt, model):
            ask = replace(ask, truncate_prompt_tokens=None)
        count = self._counted(lengths, _kind(prompt, exact=True), "local", ask, None)
        if not (chain or blocks) or ask.truncate_prompt_tokens is not None:
            return count
        return replace(count, chain=chain, blocks=blocks)

    def _is_never_cut(self, prompt: ChatPrompt | TextPrompts, model: ServedModel) -> bool:
        """Whether the server pays no heed to ``truncate_prompt_tokens``."""
        local = self.local(model)
        own = local.own if local is not None else None
        return isinstance(prompt, ChatPrompt) and prompt.responses is None and own is not None and not own.truncates

    async def message_tokens(self, ask: Ask, model: ServedModel) -> tuple[tuple[int, ...], int] | None:
        """Tokens of each message of a chat by itself, and of all else (tools, the template's own text).

        A message's share depends on it and the template alone, not on its place, so the sum is only close to the count.
        ``None`` where nothing is counted locally.
        """
        prompt, local = ask.prompt, self.local(model)
        if not isinstance(prompt, ChatPrompt) or local is None or "local" in self._state(model).distrusted:
            return None
        defaults = self._models.get(model.name, _PLAIN).default_chat_template_kwargs

        def measure() -> tuple[tuple[int, ...], int]:
            shares = local.message_tokens(prompt, defaults)
            return shares, local.overhead_tokens(prompt, defaults, shares)

        return await asyncio.get_running_loop().run_in_executor(self._renders, measure)

    async def token_ids(self, prompt: ChatPrompt | TextPrompts, body_bytes: int, model: ServedModel) -> TokenIds | None:
        """The tokens of a prompt; ``None`` where it is not tokenised here (no tokenizer, no trust, refused by vLLM)."""
        if "local" in self._state(model).distrusted:
            return None
        defaults = self._models.get(model.name, _PLAIN).default_chat_template_kwargs
        try:
            local = await self._local(model)
            if body_bytes <= INLINE_BYTES and local.encoder.is_fast:
                tokens = local.ids(prompt, defaults)
            else:
                loop = asyncio.get_running_loop()
                tokens = await loop.run_in_executor(self._encodes, local.ids, prompt, defaults)
        except (CannotCount, CannotLoad):
            return None
        return TokenIds(tokens, lambda: local.encoder.strings(tokens))

    def backend_lacks(self, url: str, path: str) -> bool:
        """Whether a backend was found, lately, not to have a counting endpoint."""
        return self._backends.lacks(url, path)

    def observe(self, model: str, count: Count, prompt_tokens: int) -> int | None:
        """Hold ``count`` against the ``usage.prompt_tokens`` that came back; returns ours − theirs.

        ``None``: nothing to compare. Calibrates the estimate, and after ``distrust_after`` wrong exact counts of one
        source takes the trust from it: a distrusted local counter is no longer asked, a distrusted backend estimates.
        """
        state = self._states.get(model)
        if state is None or prompt_tokens <= 0:
            return None
        error_tokens = count.total_tokens - prompt_tokens
        size, audited = None, True
        if isinstance(count, MeasuredCount):
            size, audited = count.size, count.audited
        if not audited and count.source not in REMOTE:
            return None if count.kind is CountKind.EXACT else error_tokens
        if size is not None:
            state.estimator.learn(size, prompt_tokens)
        if error_tokens and audited and count.kind is CountKind.EXACT and count.source != "given":
            trust = count.trust if isinstance(count, MeasuredCount) and count.trust else count.source
            state.wrong[trust] = state.wrong.get(trust, 0) + 1
            if state.wrong[trust] == self._settings.distrust_after:
                self._distrust(model, state, trust, f"last by {error_tokens:+d} of {prompt_tokens} tokens")
        return error_tokens

    async def warm(self, model: ServedModel) -> str:
        """Load what ``model`` needs, hold it against a backend on fixed conversations, and say how it is counted."""
        state = self._state(model)
        _, source = self._options(model)
        try:
            local = await self._local(model, wait_s=None)
        except CannotLoad as error:
            line = await self._warm_without(model, state, str(error))
        else:
            compared = await self._probe(local, model, state)
            if local.no_chat is not None:
                line = f"texts are counted locally, chats are not: {local.no_chat}"
            elif "local" in state.distrusted:
                line = f"counted by the backends: {state.distrusted['local']}"
            else:
                chats = f"{local.content_format} content" if local.own is None else f"chats by {local.own.name}"
                how = f"{local.encoder.name}: {local.note}; {chats}; {compared}"
                line = f"counted locally with {source} ({how})"
        return f"{model.name}: {line}"

    def describe(self, model: str) -> SourceView | None:
        """How ``model`` is counted; ``None`` before its first request or warming."""
        state = self._states.get(model)
        if state is None:
            return None
        return SourceView(model, state.source, state.reason, dict(state.wrong), state.estimator.tokens_per_byte)

    def kept_bytes(self) -> dict[str, int]:
        """Memory, about, taken by what is kept of requests: of ``conversations``, and of encoded ``texts``."""
        loaded = self._loading.loaded()
        return {
            "conversations": sum(each.kept_bytes for each in loaded),
            "texts": sum(each.encoder.kept_bytes for each in loaded),
        }

    def close(self) -> None:
        """Let the threads end."""
        for pool in (self._renders, self._encodes):
            pool.shutdown(wait=False, cancel_futures=True)

    def local(self, model: ServedModel) -> LocalCounter | None:
        """The local counter of ``model`` if it is loaded."""
        options, source = self._options(model)
        ready = self._loading.ready(source, options)
        return ready if isinstance(ready, LocalCounter) else None

    # Sources

    def _wish(self, ask: Ask, model: ServedModel) -> BlockWish | None:
        """Which KV blocks of its prompt can be looked up."""
        sizes = self._block_sizes()
        if not sizes:
            return None
        salt = ask.document.get("cache_salt")
        return BlockWish(sizes, root_key(model.adapter, salt if isinstance(salt, str) else ""))

    async def _count_locally(
        self, prompt: ChatPrompt | TextPrompts, ask: Ask, model: ServedModel, state: _State
    ) -> tuple[tuple[int, ...], Chain, PromptBlocks | None]:
        body_bytes, wish = len(ask.body), self._wish(ask, model)
        if "local" in state.distrusted:
            raise CannotCount(state.distrusted["local"])
        refuse_absurd(prompt)
        local = await self._local(model)
        defaults = self._models.get(model.name, _PLAIN).default_chat_template_kwargs
        inline = body_bytes <= INLINE_BYTES and local.encoder.is_fast
        if isinstance(prompt, ChatPrompt) and local.own is None:
            if inline:
                counted = local.begin(prompt, defaults, wish)()
            else:
                known = None
                if body_bytes <= INLINE_KNOWN_BYTES:
                    known = local.count_known(prompt, defaults, INLINE_BYTES, wish)
                counted = known or await self._count_chat(local, prompt, defaults, body_bytes, wish)
            return (counted.tokens,), counted.chain, counted.blocks
        if wish is not None and isinstance(prompt, TextPrompts) and len(prompt.texts) == 1:
            count_text = partial(local.count_text, prompt.texts[0], prompt.add_special_tokens, wish)
            loop = asyncio.get_running_loop()
            counted = count_text() if inline else await loop.run_in_executor(self._encodes, count_text)
            return (counted.tokens,), (), counted.blocks
        if inline:
            return local.count(prompt, defaults), (), None
        return await self._count_in_threads(local, prompt, defaults), (), None

    async def _count_media(self, prompt: ChatPrompt, model: ServedModel, state: _State) -> tuple[int, ...]:
        for source in ("local", LOCAL_MEDIA):
            if source in state.distrusted:
                raise CannotCount(state.distrusted[source], media=True)
        refuse_absurd(prompt)
        local = await self._local(model)
        remote = await self._remote_sizes(prompt)
        settings = self._models.get(model.name, _PLAIN)
        defaults = settings.default_chat_template_kwargs
        processor = ProcessorKwargs(
            settings.mm_processor_kwargs,
            prompt.mm_processor_kwargs,
            settings.media_io_kwargs,
            prompt.media_io_kwargs,
            settings.interleave_mm_strings,
        )
        loop = asyncio.get_running_loop()
        return (await loop.run_in_executor(self._renders, local.count_media, prompt, defaults, processor, remote),)

    async def _remote_sizes(self, prompt: ChatPrompt) -> Mapping[str, MediaSize]:
        """Sizes of images at remote addresses, where they may be fetched."""
        allowed = self._settings.fetch_media
        if allowed == "never":
            return {}
        if self._fetcher is None:
            from gateway.tokens.media.fetch import MediaFetcher  # aiohttp is slow to import

            self._fetcher = MediaFetcher(private=allowed == "any", timeout_s=self._settings.backend_timeout_s)
        try:
            return await self._fetcher.sizes(find_items(prompt.messages))
        except UnknownMedia as error:
            raise CannotCount(f"its media: {error.reason}", refused=error.refused, media=True) from None

    async def _count_in_threads(
        self, local: LocalCounter, prompt: ChatPrompt | TextPrompts, defaults: Mapping[str, Any]
    ) -> tuple[int, ...]:
        loop = asyncio.get_running_loop()
        if isinstance(prompt, ChatPrompt) and local.own is not None:
            return await loop.run_in_executor(self._encodes, local.count, prompt, defaults)
        if isinstance(prompt, ChatPrompt):
            return ((await self._count_chat(local, prompt, defaults, None)).tokens,)
        return await loop.run_in_executor(self._encodes, local.encode, prompt.texts, prompt.add_special_tokens)

    async def _count_chat(
        self,
        local: LocalCounter,
        prompt: ChatPrompt,
        defaults: Mapping[str, Any],
        body_bytes: int | None,
        wish: BlockWish | None = None,
    ) -> Counted:
        loop = asyncio.get_running_loop()
        if local.encoder.is_fast and body_bytes is not None and body_bytes <= ONE_HOP_BYTES:
            return await loop.run_in_executor(self._renders, lambda: local.begin(prompt, defaults, wish)())
        encode = await loop.run_in_executor(self._renders, local.begin, prompt, defaults, wish)
        return await loop.run_in_executor(self._encodes, encode)

    async def _count_elsewhere(
        self, ask: Ask, prompt: ChatPrompt | TextPrompts, model: ServedModel, state: _State, why: Exception
    ) -> Count:
        size = size_of(prompt)
        reasons = [str(why)]
        refused = isinstance(why, CannotCount) and why.refused
        for source in REMOTE if not refused else ():
            try:
                lengths = await self._ask(source, prompt, ask, model)
            except CannotCount as error:
                reasons.append(error.reason)
                if error.refused:
                    break
                continue
            exact = source not in state.distrusted and (source != "tokenize" or self._tokenize_is_exact(prompt, model))
            self._chose(model.name, state, source, str(why))
            return self._counted(lengths, _kind(prompt, exact=exact), source, ask, size)
        self._chose(model.name, state, "estimate", "; ".join(reasons))
        return self._counted(state.estimator.estimate(size), CountKind.ESTIMATE, "estimate", ask, size)

    async def _ask(
        self, source: str, prompt: ChatPrompt | TextPrompts, ask: Ask | None, model: ServedModel
    ) -> tuple[int, ...]:
        settings = self._models.get(model.name, _PLAIN)
        urls = (settings.render_url,) if source == "render" and settings.render_url else model.backends
        if source == "tokenize" and isinstance(prompt, ChatPrompt):
            prompt = self._as_chat(prompt, model)
        return await self._backends.count(source, prompt, ask, model.name, urls, model.api_keys, model.vllm_version)

    def _as_chat(self, prompt: ChatPrompt, model: ServedModel) -> ChatPrompt:
        """The prompt as ``/tokenize`` must have it, which knows neither Anthropic's rules nor the server's flags."""
        local = self.local(model)
        if prompt.from_messages and local is not None and local.no_chat is None:
            prompt = local.settled(prompt)
        if prompt.tool_choice == "none" and self._models.get(model.name, _PLAIN).exclude_tools_when_tool_choice_none:
            prompt = replace(prompt, tools=None)
        return prompt

    def _tokenize_is_exact(self, prompt: ChatPrompt | TextPrompts, model: ServedModel) -> bool:
        """Whether ``/tokenize`` renders this as serving would."""
        if not isinstance(prompt, ChatPrompt):
            return True
        local = self.local(model)
        if local is not None:
            return not local.tokenize_differs
        # Where the template is not known, nor is what it would make of these (see gateway/tokens/anthropic.py).
        inline = any(message.get("role") == "system" for message in prompt.messages[1:])
        return not (prompt.from_messages and (inline or prompt.reasoning_effort == "none"))

    @staticmethod
    def _counted(lengths: tuple[int, ...], kind: CountKind, source: str, ask: Ask, size: Size | None) -> Count:
        limit = ask.truncate_prompt_tokens
        if limit is not None and limit >= 0:
            lengths = tuple(min(length, limit) for length in lengths)
        media = ask.has_media and source == "local"
        audited = (media or not ask.has_media) and (limit is None or limit >= 0)
        longest = max(lengths, default=0)
        if size is None and audited and not media:
            return Count(longest, sum(lengths), kind, source)
        trust = LOCAL_MEDIA if media else ""
        return MeasuredCount(longest, sum(lengths), kind, source, size=size, audited=audited, trust=trust)

    # Loading and trust

    def _options(self, model: ServedModel) -> tuple[TemplateOptions, str]:
        override = self._models.get(model.name, _PLAIN)
        given = override.chat_template_content_format
        options = TemplateOptions(
            override.chat_template,
            None if given == "auto" else given,
            override.trust_request_chat_template,
            override.exclude_tools_when_tool_choice_none,
            BackendClock(override.timezone, override.start_date),
        )
        return options, override.tokenizer or model.root

    async def _local(self, model: ServedModel, wait_s: float | None = WAIT_S) -> LocalCounter:
        if not self._settings.local:
            raise CannotLoad("local counting is switched off")
        options, source = self._options(model)
        return await self._loading.get(source, options, wait_s)

    def _load(self, source: str, options: TemplateOptions) -> LocalCounter:
        return load(source, options, hub=self._settings.hub, cache_bytes=self._settings.segment_cache_bytes)

    def _state(self, model: ServedModel) -> _State:
        """What is known of the model; a backend restarted with another model or vLLM is judged anew."""
        state = self._states.get(model.name)
        if state is None or state.root != model.root:
            state = self._states[model.name] = _State(model.root, model.vllm_version)
        elif model.vllm_version is not None and state.vllm_version != model.vllm_version:
            if state.vllm_version is not None:
                for source in state.distrusted:
                    self._note(model.name, source, "regained")
                state.wrong.clear()
                state.distrusted.clear()
            state.vllm_version = model.vllm_version
        return state

    def _distrust(self, model: str, state: _State, source: str, why: str) -> None:
        state.distrusted[source] = f"{source} counts were wrong, {why}"
        self._note(model, source, "lost")
        log.warning("%s: %s; it is not trusted until the backend changes", model, state.distrusted[source])

    def _chose(self, model: str, state: _State, source: str, reason: str) -> None:
        if state.source != source:
            log.info("%s: counted by source %s%s", model, source, f" ({reason})" if reason else "")
        state.source, state.reason = source, reason

    async def _probe(self, local: LocalCounter, model: ServedModel, state: _State) -> str:
        """Compare local counts with the backends' on fixed requests; what differs is not trusted."""
        defaults = self._models.get(model.name, _PLAIN).default_chat_template_kwargs
        comparisons = [await self._compare(source, local, defaults, model) for source in REMOTE]
        confirmed = False
        for comparison in comparisons:
            if comparison.difference and confirmed and comparison.source == "tokenize":
                self._distrust(model.name, state, "tokenize", comparison.difference)
            elif comparison.difference and "local" not in state.distrusted:
                self._distrust(model.name, state, "local", comparison.difference)
            confirmed = confirmed or (comparison.asked > 0 and not comparison.difference)
        return "; ".join(map(str, comparisons))

    async def _compare(
        self, source: str, local: LocalCounter, defaults: Mapping[str, Any], model: ServedModel
    ) -> Comparison:
        comparison = Comparison(source)
        for prompt, ask in probes_for(source):
            if isinstance(prompt, ChatPrompt) and source == "tokenize" and local.tokenize_differs:
                continue
            try:
                (ours,) = await self._count_in_threads(local, prompt, defaults)
                (theirs,) = await self._ask(source, prompt, ask, model)
            except CannotCount as error:
                comparison.absent = comparison.absent or error.reason
                continue
            comparison.asked += 1
            comparison.equal += ours == theirs
            if ours != theirs:
                comparison.difference = f"{source} of the backend counts {theirs} where we count {ours}"
                break
        return comparison

    async def _warm_without(self, model: ServedModel, state: _State, why: str) -> str:
        """Which source counts where there is no local one."""
        reasons = [why]
        for source in REMOTE:
            prompt, ask = probes_for(source)[0]
            try:
                await self._ask(source, prompt, ask, model)
            except CannotCount as error:
                reasons.append(error.reason)
                continue
            if source == "count_tokens":
                continue  # Anthropic's requests alone; what counts the others decides
            self._chose(model.name, state, source, why)
            return f"counted by the backends' {source}: {'; '.join(reasons)}"
        self._chose(model.name, state, "estimate", "; ".join(reasons))
        return f"estimated: {'; '.join(reasons)}"


def _with_blocks(count: Count, ask: Ask, wish: BlockWish | None) -> Count:
    """The count of token ids as given, with their KV blocks if they are one prompt."""
    prompt = ask.document.get("prompt")
    if wish is None or not isinstance(prompt, list) or len(prompt) != count.tokens:
        return count
    try:
        ids = id_bytes(prompt)
    except (TypeError, OverflowError):
        return count
    keys = {size: block_keys(ids, size, wish.root) for size in wish.sizes}
    return replace(count, blocks=PromptBlocks(count.tokens, keys))


def _kind(prompt: ChatPrompt | TextPrompts, *, exact: bool) -> CountKind:
    """An exact count of texts that the engine joins in a way not known here is an estimate all the same."""
    approximate = isinstance(prompt, TextPrompts) and prompt.approximate
    return CountKind.EXACT if exact and not approximate else CountKind.ESTIMATE
