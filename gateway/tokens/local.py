"""Counting with the model's own tokenizer and chat template, in this process: load it, then count prompts with it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import orjson

from gateway.block_keys import BlockWish
from gateway.tokens.anthropic import effort_without_thinking, settled, wants_system_first
from gateway.tokens.clock import LOCAL_CLOCK, BackendClock
from gateway.tokens.encoder import Encoder, best_encoder
from gateway.tokens.errors import CannotCount, CannotLoad
from gateway.tokens.estimate import size_of
from gateway.tokens.families import mistral_file, own_chats
from gateway.tokens.growing import Chat, Conversations, Counted, Found, whole
from gateway.tokens.lru import Lru
from gateway.tokens.media.errors import UnknownMedia
from gateway.tokens.media.families import ProcessorKwargs, family_of
from gateway.tokens.media.family import ModelFiles
from gateway.tokens.media.prompt import expanded, find_items, measured, noted, with_stand_ins
from gateway.tokens.media.sizes import MediaSize
from gateway.tokens.messages import ContentFormat, conversation, tools_for_template
from gateway.tokens.mistral import MistralEncoder
from gateway.tokens.own import OwnChats
from gateway.tokens.shares import CACHE_ENTRIES, Shares
from gateway.tokens.template import ChatTemplate
from gateway.types import ChatPrompt, Prompt, TextPrompts, TokenPrompts

# A run of 50 million equal letters takes an encoder half a minute, and no window holds so much text anyway: beyond 16
# million characters (about 4 million tokens) a request is estimated, and vLLM refuses it by its number of characters.
MAX_TEXT_CHARS = 16_000_000

# Of tools as they were sent.
TOOL_LISTS_BYTES = 16 << 20
# Templates that came with requests (--trust-request-chat-template) are few in practice.
MOST_GIVEN_TEMPLATES = 16


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """What the server was told about chat templates. ``content_format`` ``None`` stands for ``auto``.

    ``trust_request``: a template that comes with a request is rendered (``--trust-request-chat-template``).
    ``exclude_tools``: a request with ``tool_choice`` ``none`` shows the model no tools
    (``--exclude-tools-when-tool-choice-none``).
    """

    chat_template: Path | None = None
    content_format: ContentFormat | None = None
    trust_request: bool = False
    exclude_tools: bool = False
    clock: BackendClock = LOCAL_CLOCK


class LocalCounter:
    """Counts prompts of one model. Blocking; safe to call from several threads.

    ``encoder`` and ``note`` say who encodes and why; ``no_chat`` is why chats cannot be counted, if they cannot.
    ``own`` counts chats that no template renders.
    """

    def __init__(
        self,
        encoder: Encoder,
        note: str,
        templates: Mapping[str, ChatTemplate] | None,
        special_tokens: Mapping[str, Any],
        options: TemplateOptions,
        no_chat: str | None,
        files: ModelFiles | None = None,
        own: OwnChats | None = None,
        history_bytes: int = 0,
    ) -> None:
        self.encoder = encoder
        self.note = note
        self.no_chat = no_chat
        self.own = own
        self._files = files or ModelFiles({})
        self._templates = templates or {}
        self._special_tokens = special_tokens
        self._options = options
        self._system_first: bool | None = None
        self._effort_of_none: str | None = None
        self._given: dict[str, ChatTemplate] = {}
        self._shares: Lru[tuple[bytes, bytes], int] = Lru(CACHE_ENTRIES)
        self._known_tools: Lru[int, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = Lru(TOOL_LISTS_BYTES)
        self._conversations: Conversations | None = None
        if encoder.edges is not None and history_bytes:
            self._conversations = Conversations(encoder, encoder.edges, special_tokens, history_bytes)

    def count(self, prompt: Prompt, default_kwargs: Mapping[str, Any]) -> tuple[int, ...]:
        """Tokens of each prompt for the engine, untruncated. Raises ``CannotCount``."""
        match prompt:
            case TokenPrompts(lengths=lengths):
                return lengths
            case TextPrompts(texts=texts, add_special_tokens=special):
                return self.encode(texts, special)
            case ChatPrompt() if self.own is not None:
                return (self._own_tokens(prompt, self.own, default_kwargs),)
            case ChatPrompt():
                return (self.begin(prompt, default_kwargs)().tokens,)

    def begin(
        self, prompt: ChatPrompt, default_kwargs: Mapping[str, Any], wish: BlockWish | None = None
    ) -> Callable[[], Counted]:
        """Render a chat, or as much of it as is new; what it returns encodes and counts. Both raise ``CannotCount``.

        The first part holds the GIL, the second mostly does not. ``wish``: of its KV blocks.
        """
        found = self._find(prompt, default_kwargs)
        if found is not None and self._conversations is not None:
            rendered = self._conversations.render(found, wish)
            if rendered is not None:
                return partial(self._conversations.count, rendered, MAX_TEXT_CHARS, wish)
        text = self.render(prompt, default_kwargs)
        return partial(whole, text, self.encoder, MAX_TEXT_CHARS, prompt.add_special_tokens, wish)

    def count_known(
        self,
        prompt: ChatPrompt,
        default_kwargs: Mapping[str, Any],
        most_new_bytes: int,
        wish: BlockWish | None = None,
    ) -> Counted | None:
        """Count a chat of which all but ``most_new_bytes`` were counted before; ``None`` for others.

        Takes well below a millisecond. Where the whole might have to be rendered again it is left to ``begin``. Raises
        ``CannotCount``.
        """
        found = self._find(prompt, default_kwargs, only_known=True) if self.encoder.is_fast else None
        if found is None or found.known is None or found.new_bytes > most_new_bytes or found.asks:
            return None
        if self._conversations is None or found.lacks_ids(wish):
            return None
        rendered = self._conversations.render(found, wish)
        return self._conversations.count(rendered, MAX_TEXT_CHARS, wish) if rendered is not None else None

    def count_text(self, text: str, add_special_tokens: bool, wish: BlockWish) -> Counted:
        """Count a text and key its KV blocks. Raises ``CannotCount``."""
        return whole(text, self.encoder, MAX_TEXT_CHARS, add_special_tokens, wish)

    def _find(self, prompt: ChatPrompt, default_kwargs: Mapping[str, Any], only_known: bool = False) -> Found | None:
        if self.no_chat is not None:
            raise CannotCount(self.no_chat)
        if self._conversations is None or self.own is not None or prompt.add_special_tokens:
            return None
        prompt = self._readied(prompt)
        return self._conversations.find(self._chat(prompt, template_variables(prompt, default_kwargs)), only_known)

    def count_media(
        self,
        prompt: ChatPrompt,
        default_kwargs: Mapping[str, Any],
        kwargs: ProcessorKwargs,
        remote: Mapping[str, MediaSize],
    ) -> int:
        """Tokens of a chat with images, sounds or videos. Raises ``CannotCount``.

        ``remote``: sizes of items at remote addresses.
        """
        try:
            items = find_items(prompt.messages)
            if not items:
                return self.count(prompt, default_kwargs)[0]
            family = family_of(self._files, kwargs, {item.modality for item in items})
            sizes = measured(items, remote)
            stood_in = replace(prompt, messages=with_stand_ins(prompt.messages, family, kwargs.interleave))
            text, added = expanded(self.render(stood_in, default_kwargs), sizes, family)
            notes = noted(sizes, family)
        except UnknownMedia as error:
            raise CannotCount(f"its media: {error.reason}", refused=error.refused, media=True) from None
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # configurations of an odd shape
            raise CannotCount(f"its media: {type(error).__name__}: {error}", media=True) from None
        added += sum(self.encode(notes, False)) if notes else 0
        return self.encode((text,), prompt.add_special_tokens)[0] + added

    def _own_tokens(self, prompt: ChatPrompt, own: OwnChats, default_kwargs: Mapping[str, Any]) -> int:
        prompt = self._readied(prompt)
        size = size_of(prompt)
        if size.media:
            raise CannotCount("images, audio and video are counted by the backend", media=True)
        if size.prompts_bytes[0] > MAX_TEXT_CHARS:
            raise CannotCount(f"{size.prompts_bytes[0]} bytes are too many to count", refused=True)
        return own.tokens(prompt, template_variables(prompt, default_kwargs))

    def _readied(self, prompt: ChatPrompt) -> ChatPrompt:
        """As the server makes it before it renders: Anthropic's rules, and no tools where its flags say so."""
        if prompt.from_messages:
            prompt = self.settled(prompt)
        without_tools = prompt.tool_choice == "none" and self._options.exclude_tools
        return replace(prompt, tools=None) if without_tools else prompt

    def encode(self, texts: Sequence[str], add_special_tokens: bool) -> tuple[int, ...]:
        """Tokens of each text."""
        for text in texts:
            if len(text) > MAX_TEXT_CHARS:
                raise CannotCount(f"{len(text)} characters are too many to count", refused=True)
        return tuple(self.encoder.count(text, add_special_tokens) for text in texts)

    def ids(self, prompt: ChatPrompt | TextPrompts, default_kwargs: Mapping[str, Any]) -> list[int]:
        """Token ids of the prompt, or of all texts one after the other. Raises ``CannotCount``."""
        if isinstance(prompt, ChatPrompt) and self.own is not None and not self.own.is_text:
            raise CannotCount(f"the token ids of chats by {self.own.name} are not known here")
        texts = (self.render(prompt, default_kwargs),) if isinstance(prompt, ChatPrompt) else prompt.texts
        if sum(map(len, texts)) > MAX_TEXT_CHARS:
            raise CannotCount(f"more than {MAX_TEXT_CHARS} characters are too many to tokenise", refused=True)
        try:
            return [token for text in texts for token in self.encoder.ids(text, prompt.add_special_tokens)]
        except (TypeError, UnicodeEncodeError) as error:
            raise CannotCount(f"the text is not valid Unicode: {error}", refused=True) from None

    def measure(self, text: str) -> int:
        """Tokens of a bare text, special tokens in it recognised and none added. Raises ``CannotCount``."""
        return self.encode((text,), add_special_tokens=False)[0]

    def message_tokens(self, prompt: ChatPrompt, default_kwargs: Mapping[str, Any]) -> tuple[int, ...]:
        """Tokens of each message by itself, wherever it stands (see ``shares``). Never raises."""
        return self._shares_of(prompt, default_kwargs).of_messages(self._shares)

    def overhead_tokens(self, prompt: ChatPrompt, default_kwargs: Mapping[str, Any], shares: Sequence[int]) -> int:
        """Tokens of what belongs to no message: tools, the template's own text. ``shares``: of ``message_tokens``."""
        return self._shares_of(prompt, default_kwargs).overhead(shares)

    def _shares_of(self, prompt: ChatPrompt, default_kwargs: Mapping[str, Any]) -> Shares:
        return Shares(prompt, default_kwargs, lambda chat: self.count(chat, default_kwargs)[0], self.measure)

    def render(self, prompt: ChatPrompt, default_kwargs: Mapping[str, Any]) -> str:
        """The text of a chat. ``default_kwargs``: the server's ``--default-chat-template-kwargs``."""
        if self.no_chat is not None:
            raise CannotCount(self.no_chat)
        prompt = self._readied(prompt)
        variables = template_variables(prompt, default_kwargs)
        if self.own is not None:
            return self.own.render(prompt, variables)
        chat = self._chat(prompt, variables)
        messages = conversation(prompt.messages, chat.content_format)
        return chat.template.render(messages, chat.tools, variables, self._special_tokens)

    def _chat(self, prompt: ChatPrompt, variables: Mapping[str, Any]) -> Chat:
        """What is to be rendered, by which template. Raises ``CannotCount``."""
        given = prompt.chat_template
        if (given is not None or prompt.chat_template_kwargs.get("chat_template") is not None) and (
            not self._options.trust_request
        ):
            raise CannotCount("a request's own chat template is not trusted here", refused=True)
        if "tools" in variables:
            tools = variables["tools"]
            if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
                raise CannotCount("tools in chat_template_kwargs must be a list of objects", refused=True)
        else:
            tools = self._tools(prompt.tools)
        template = self._template(tools is not None, given)
        content_format = self._options.content_format or template.content_format
        return Chat(template, content_format, prompt.messages, tools, variables)

    def _tools(self, sent: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        """``tools_for_template``, once for each object: bodies that grow come with the same one again."""
        if sent is None:
            return None
        known = self._known_tools.get(id(sent))
        if known is not None and known[0] is sent:
            return known[1]
        tools = tools_for_template(sent)
        try:
            size_bytes = len(orjson.dumps(sent))
        except TypeError:  # integers beyond 64 bits
            return tools
        if tools is not None:
            self._known_tools.put(id(sent), (sent, tools), size_bytes)
        return tools

    def settled(self, prompt: ChatPrompt) -> ChatPrompt:
        """The chat that vLLM makes of an Anthropic request for this model's template."""
        if self._system_first is None:
            no_template = self.own is not None and not self._templates
            templates = () if no_template else (self._template(tools) for tools in (False, True))
            self._system_first = wants_system_first({template.source for template in templates})
        if prompt.reasoning_effort == "none" and self._effort_of_none is None:
            self._effort_of_none = effort_without_thinking(lambda trial: self.render(trial, {}))
        return settled(prompt, self._system_first, self._effort_of_none or "none")

    @property
    def kept_bytes(self) -> int:
        """Memory taken by what is kept of conversations, about."""
        return self._conversations.kept_bytes if self._conversations is not None else 0

    @property
    def content_format(self) -> ContentFormat:
        """Of chats without tools. Raises ``CannotCount`` if there is no template."""
        return self._options.content_format or self._template(False).content_format

    @property
    def tokenize_differs(self) -> bool:
        """Whether the server's ``/tokenize`` renders chats in another way than its chat endpoint does."""
        return self.own is not None and self.own.tokenize_differs

    def _template(self, with_tools: bool, given: str | None = None) -> ChatTemplate:
        """vLLM's order: the request's, ``--chat-template``, the processor's (without tools only), the tokenizer's."""
        if given:
            return self._compiled(given)
        order = ["given", *(["tool_use"] if with_tools else ["processor"]), "default"]
        for name in order:
            if name in self._templates:
                return self._templates[name]
        raise CannotCount("the model has several chat templates and no default")

    def _compiled(self, source: str) -> ChatTemplate:
        """A request's own template. The last few are kept: compiling takes milliseconds."""
        template = self._given.get(source)
        if template is None:
            try:
                template = ChatTemplate(source, self._options.clock)
            except jinja2.TemplateError as error:
                raise CannotCount(f"the request's chat template is none: {error}", refused=True) from None
            if len(self._given) >= MOST_GIVEN_TEMPLATES:
                self._given.clear()
            self._given[source] = template
        return template


def template_variables(prompt: ChatPrompt, default_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The template kwargs of a request, merged as vLLM 0.32 merges them.

    Server defaults < ``chat_template_kwargs`` < typed fields; ``None`` and ``"auto"`` never override. A reasoning
    effort switches ``enable_thinking`` unless the request says it itself.
    """
    typed: dict[str, Any] = {
        "add_generation_prompt": prompt.add_generation_prompt,
        "continue_final_message": prompt.continue_final_message,
        "documents": prompt.documents,
        "reasoning_effort": prompt.reasoning_effort,
    }
    asked = dict(prompt.chat_template_kwargs)
    if prompt.reasoning_effort is not None and "enable_thinking" not in asked:
        typed["enable_thinking"] = prompt.reasoning_effort != "none"
    return _over(dict(default_kwargs), _over(asked, typed))


def _over(under: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    return under | {key: value for key, value in over.items() if value is not None and value != "auto"}


def load(source: str, options: TemplateOptions, *, hub: bool, cache_bytes: int) -> LocalCounter:
    """Load tokenizer and templates of ``source``, a folder or hub id. Blocks for seconds. Raises ``CannotLoad``.

    ``hub``: whether files that are not on this machine may be fetched. Code from the model's repository never runs.
    """
    if (Path(source).is_absolute() or source.startswith(".")) and not Path(source).is_dir():
        raise CannotLoad(f"there is no folder {source} on this machine")
    # transformers advises to install PyTorch, which nothing here needs.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        from transformers import AutoTokenizer
        from transformers.utils import logging as transformers_logging
    except ImportError as error:
        raise CannotLoad(f"transformers is not installed: {error}") from None
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs every retry; one line of ours says it all
    offline = not hub or Path(source).is_dir()
    files = _Files(source, offline)
    tekken = mistral_file(files)
    if tekken is not None:
        return _mistral(tekken, files, options)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, local_files_only=offline)
    except Exception as error:  # anything: no network, no such repository, code that would have to run, broken files
        raise CannotLoad(f"no tokenizer from {source}: {_one_line(error)}") from None
    encoder, note = best_encoder(tokenizer, cache_bytes - cache_bytes // 4)
    no_chat, own = None, None
    templates: dict[str, ChatTemplate] = {}
    try:
        own = own_chats(files, encoder, options.clock)
        if own is None or own.uses_template:
            templates = _templates(tokenizer, files, options)
    except CannotLoad as error:
        no_chat = str(error)
    except (jinja2.TemplateError, OSError, UnicodeDecodeError) as error:
        no_chat = f"its chat template cannot be used: {_one_line(error)}" if own is None else None
    if own is None and no_chat is None and not templates:
        no_chat = "it has no chat template"
    return LocalCounter(
        encoder,
        note,
        templates,
        dict(tokenizer.special_tokens_map),
        options,
        no_chat,
        _model_files(files),
        own,
        history_bytes=cache_bytes // 4,
    )


def _mistral(file: Path, files: _Files, options: TemplateOptions) -> LocalCounter:
    try:
        encoder = MistralEncoder(file)
    except CannotLoad:
        raise
    except Exception as error:  # whatever the library raises for a file it does not know
        raise CannotLoad(f"mistral-common cannot read {file.name}: {_one_line(error)}") from None
    own = own_chats(files, encoder, options.clock)
    return LocalCounter(encoder, file.name, None, {}, options, None, _model_files(files), own)


class _Files:
    """JSON files beside the tokenizer. An absent or broken one is an empty object."""

    def __init__(self, source: str, offline: bool) -> None:
        self.source = source
        self._offline = offline

    def json(self, name: str) -> Mapping[str, Any]:
        path = self.path(name)
        if path is None:
            return {}
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def path(self, name: str) -> Path | None:
        from transformers.utils import cached_file

        try:
            found = cached_file(
                self.source,
                name,
                local_files_only=self._offline,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_gated_repo=False,
                _raise_exceptions_for_connection_errors=False,
            )
        except OSError:
            return None
        return Path(found) if found else None


def _model_files(files: _Files) -> ModelFiles:
    names = ("config.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
    return ModelFiles(*(files.json(name) for name in names))


def _templates(tokenizer: Any, files: _Files, options: TemplateOptions) -> dict[str, ChatTemplate]:
    """Templates by use: ``given``, ``processor``, ``default``, ``tool_use``."""
    own = tokenizer.chat_template
    sources: dict[str, str] = {}
    if isinstance(own, str):
        sources["default"] = own
    elif isinstance(own, Mapping):
        sources = {name: own[name] for name in ("default", "tool_use") if name in own}
    processor = _processor_template(files)
    if processor is not None:
        sources["processor"] = processor
    if options.chat_template is not None:
        sources["given"] = options.chat_template.read_text(encoding="utf-8")
    return {name: ChatTemplate(source, options.clock) for name, source in sources.items()}


def _processor_template(files: _Files) -> str | None:
    """The chat template of a multimodal model's processor, which vLLM prefers for requests without tools."""
    processor = files.json("processor_config.json")
    has_processor = any(
        "processor_class" in files.json(name) for name in ("preprocessor_config.json", "tokenizer_config.json")
    )
    if not has_processor and "processor_class" not in processor:
        return None
    template = files.json("chat_template.json").get("chat_template", processor.get("chat_template"))
    return template if isinstance(template, str) else None


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
