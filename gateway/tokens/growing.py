"""Counts conversations that grow: what was counted in an earlier request is not rendered and encoded again.

For the conversations seen last, the messages of the newest request are kept with their normalised form, what the
template's loop depended on (``session.Marks``) and the tokens up to each message where the text may be cut there
(``edges``). The next request's messages are compared with them, by identity or byte for byte; what is equal is not
normalised again, and the template starts rendering at the first message whose text may be another than before.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from gateway.block_keys import ID_BYTES, BlockWish, Keys, PromptBlocks, block_keys, same_bytes
from gateway.tokens.chain import Chain, Entry, entries_of_whole
from gateway.tokens.edges import Edges
from gateway.tokens.encoder import Encoder
from gateway.tokens.errors import CannotCount
from gateway.tokens.lru import Lru
from gateway.tokens.messages import ContentFormat, Message, conversation
from gateway.tokens.session import Marks, Session
from gateway.tokens.template import ChatTemplate

# Conversations that begin alike (the same system prompt and first question) and were told apart later.
_BRANCHES = 4
_plain = json.JSONEncoder(ensure_ascii=False).encode
# Of a message or a tool: its bytes, its texts here and in normalised form.
_BYTES_PER_BYTE = 3
_BYTES_PER_MESSAGE = 1500


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat that is ready to be normalised and rendered: all that vLLM decides before is decided."""

    template: ChatTemplate
    content_format: ContentFormat
    messages: Sequence[Any]
    tools: list[dict[str, Any]] | None
    variables: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Counted:
    """Tokens of a prompt, its chain (see ``Count.chain``), and its KV blocks where they were wished for."""

    tokens: int
    chain: tuple[Entry, ...]
    blocks: PromptBlocks | None = None


@dataclass(frozen=True, slots=True)
class _Cut:
    """A clean cut: what was counted up to it. ``by_end``: clean by what stands before it, whatever comes after."""

    chain: Chain
    chars: int
    by_end: bool


@dataclass(frozen=True, slots=True)
class _Known:
    """The newest request of one conversation. ``cuts[i]`` is the cut before message i, ``None`` if it is not clean.

    ``ids`` are its token ids (``block_keys.id_bytes``), ``None`` if nobody wished for its KV blocks; ``keys`` those of
    its blocks by their size and what stands before them."""

    sent: Sequence[Any]
    raw: Sequence[bytes]
    messages: list[Message]
    marks: Marks
    cuts: Sequence[_Cut | None]
    ids: bytes | None = None
    keys: Mapping[tuple[int, int], Keys] = field(default_factory=dict)


_Key = tuple[ChatTemplate, int, bytes, bytes]


@dataclass(frozen=True, slots=True)
class Found:
    """What is known of a chat. ``same``: its first messages that are known; ``new_bytes``: the JSON of the others.

    ``asks``: among these is a question, after which many templates render what was said before differently.
    """

    chat: Chat
    key: _Key
    raw: list[bytes]
    known: _Known | None
    same: int
    new_bytes: int
    asks: bool

    def lacks_ids(self, wish: BlockWish | None) -> bool:
        """Whether all must be rendered again for the sake of its KV blocks."""
        return wish is not None and self.known is not None and self.known.ids is None


@dataclass(frozen=True, slots=True)
class Rendered:
    """A chat rendered but not yet encoded."""

    found: Found
    messages: list[Message]
    session: Session


class Conversations:
    """What is kept of the conversations that were counted last, within ``limit_bytes`` (about). For several threads."""

    def __init__(self, encoder: Encoder, edges: Edges, special_tokens: Mapping[str, Any], limit_bytes: int) -> None:
        self._encoder = encoder
        self._edges = edges
        self._special_tokens = special_tokens
        self._known: Lru[_Key, tuple[_Known, ...]] = Lru(limit_bytes)
        self._tools: Lru[bytes, list[dict[str, Any]]] = Lru(limit_bytes)

    @property
    def kept_bytes(self) -> int:
        """Memory taken, about."""
        return self._known.weight + self._tools.weight

    def find(self, chat: Chat, only_known: bool = False) -> Found | None:
        """Look ``chat`` up. ``None`` if it cannot be compared with others: it must be rendered whole.

        ``only_known``: ``None``, soon, for a chat of which nothing is known, too.
        """
        if chat.template.plan is None or not chat.messages:
            return None
        try:
            tools = self._lasting(chat)
            raw = [_raw(message) for message in chat.messages[:2]]
            key = (chat.template, id(tools), raw[0], raw[-1])
            chat = Chat(chat.template, chat.content_format, chat.messages, tools, chat.variables)
            best, same = None, 0
            for known in self._known.get(key) or ():
                equal = _equal(chat.messages, raw, known)
                if equal > same:
                    best, same = known, equal
            if best is None and only_known:
                return None
            if best is not None:
                raw[:same] = best.raw[:same]
            raw.extend(map(_raw, chat.messages[len(raw) :]))
        except (TypeError, ValueError, RecursionError):  # lone surrogates, huge integers
            return None
        asks = any(isinstance(each, dict) and each.get("role") == "user" for each in chat.messages[same:])
        return Found(chat, key, raw, best, same, sum(map(len, raw[same:])), asks)

    def render(self, found: Found, wish: BlockWish | None = None) -> Rendered | None:
        """Normalise and render what is new. ``None`` if the chat must be rendered whole. Raises ``CannotCount``.

        ``wish``: as for ``count``.
        """
        chat, known = found.chat, found.known
        messages = list(known.messages[: found.same]) if known is not None else []
        new = chat.messages[found.same :]
        if new:
            messages += conversation(new, chat.content_format)
        restarts = [cut is not None for cut in known.cuts] if known is not None else []
        marks = None if known is None or found.lacks_ids(wish) else known.marks
        session = self._resume(chat, messages, marks, restarts)
        if session is None:
            return None
        if known is not None and session.start and not self._is_clean_again(known, session):
            session = self._resume(chat, messages, None, ())
        return Rendered(found, messages, session) if session is not None else None

    def count(self, rendered: Rendered, most_chars: int, wish: BlockWish | None = None) -> Counted:
        """Encode what is new, and keep all for the next request. Raises ``CannotCount``.

        ``wish``: of its KV blocks; only those that are new are hashed.
        """
        session, known = rendered.session, rendered.found.known
        if not session.entered:
            return whole("".join(session.pieces), self._encoder, most_chars, wish=wish)
        start = session.start
        at, pieces = session.at, session.pieces
        texts = ["".join(pieces[one:next]) for one, next in zip(at, [*at[1:], len(pieces)], strict=True)]
        cuts: list[_Cut | None] = []
        chain, chars = Chain(), 0
        parts: list[bytes] = []
        if start and known is not None:
            cuts += known.cuts[: start + 1]
            cut = known.cuts[start]
            assert cut is not None
            chain, chars = cut.chain, cut.chars
            if known.ids is not None:
                parts.append(known.ids[: chain.tokens * ID_BYTES])
        else:
            texts.insert(0, session.marks.before)
        following = _following(texts)
        pending = ""
        for place, text in enumerate(texts):
            pending += text
            if len(pending) + chars > most_chars:
                raise CannotCount(f"more than {most_chars} characters are too many to count", refused=True)
            by_end = self._edges.end_clean(pending) if pending else not chars
            is_last = place == len(texts) - 1
            if not (is_last or by_end or self._edges.start_clean(following[place])):
                cuts.append(None)
                continue
            if pending:
                if wish is None:
                    tokens = self._encoder.count(pending, False)
                else:
                    parts.append(self._encoder.id_bytes(pending, False))
                    tokens = len(parts[-1]) // ID_BYTES
                chain = chain.then(pending, tokens)
                chars += len(pending)
                pending = ""
            if not is_last:
                cuts.append(_Cut(chain, chars, by_end))
        if wish is None:
            self._keep(rendered, cuts, None, {})
            return Counted(chain.tokens, chain.entries)
        ids = b"".join(parts)
        blocks = _blocks(ids, wish, known)
        self._keep(rendered, cuts, ids, {(size, wish.root): keys for size, keys in blocks.keys.items()})
        return Counted(chain.tokens, chain.entries, blocks)

    def _resume(
        self, chat: Chat, messages: list[Message], marks: Marks | None, restarts: Sequence[bool]
    ) -> Session | None:
        return chat.template.resume(messages, chat.tools, chat.variables, self._special_tokens, marks, restarts)

    def _is_clean_again(self, known: _Known, session: Session) -> bool:
        cut = known.cuts[session.start]
        if cut is None or cut.by_end:
            return cut is not None
        text = next((piece for piece in session.pieces[session.at[0] :] if piece), "")
        return self._edges.start_clean(text)

    def _keep(
        self,
        rendered: Rendered,
        cuts: list[_Cut | None],
        ids: bytes | None,
        keys: Mapping[tuple[int, int], Keys],
    ) -> None:
        found = rendered.found
        sent = list(found.chat.messages)
        new = _Known(sent, found.raw, rendered.messages, rendered.session.marks, cuts, ids, keys)
        others = [each for each in self._known.get(found.key) or () if each is not found.known]
        if found.known is not None and found.same < min(len(found.known.sent), len(new.sent)):
            others.insert(0, found.known)  # it went another way: it may go on, too
        branches = (new, *others[: _BRANCHES - 1])
        self._known.put(found.key, branches, sum(map(_weight, branches)))

    def _lasting(self, chat: Chat) -> list[dict[str, Any]] | None:
        """The tools, as the object that stood for them before."""
        if chat.tools is None:
            return None
        raw = _raw(chat.tools)
        if b"null" in raw:
            raw = _plain(chat.tools).encode()
        known = self._tools.get(raw)
        if known is None:
            known = chat.tools
            self._tools.put(raw, known, _BYTES_PER_BYTE * len(raw))
            chat.template.keep_printed(known, len(raw))
        return known


def whole(
    text: str, encoder: Encoder, most_chars: int, add_special_tokens: bool = False, wish: BlockWish | None = None
) -> Counted:
    """Count a text of which nothing is known. Raises ``CannotCount``."""
    if len(text) > most_chars:
        raise CannotCount(f"{len(text)} characters are too many to count", refused=True)
    if wish is None:
        tokens = encoder.count(text, add_special_tokens)
        return Counted(tokens, entries_of_whole(text, tokens))
    ids = encoder.id_bytes(text, add_special_tokens)
    tokens = len(ids) // ID_BYTES
    return Counted(tokens, entries_of_whole(text, tokens), _blocks(ids, wish, None))


def _blocks(ids: bytes, wish: BlockWish, known: _Known | None) -> PromptBlocks:
    """The blocks of a prompt. The keys of those that a known one begins with are not made again."""
    before: Mapping[tuple[int, int], Keys] = {}
    same_tokens = 0
    if known is not None and known.ids is not None:
        before, same_tokens = known.keys, same_bytes(known.ids, ids) // ID_BYTES
    keys = {
        size: block_keys(ids, size, wish.root, before.get((size, wish.root), ())[: same_tokens // size])
        for size in wish.sizes
    }
    return PromptBlocks(len(ids) // ID_BYTES, keys)


def _weight(known: _Known) -> int:
    """Bytes that are taken, about. What stands before the messages (tools) is kept once in ``before``, and in
    ``entry`` where the loop might read it."""
    before = len(known.marks.before) + sum(len(text) for _, *texts in known.marks.entry for text in texts if _is(text))
    ids = len(known.ids or b"") + sum(8 * len(keys) for keys in known.keys.values())
    return before + ids + _BYTES_PER_BYTE * sum(map(len, known.raw)) + _BYTES_PER_MESSAGE * len(known.raw)


def _is(text: Any) -> bool:
    return type(text) is str


def _following(texts: list[str]) -> list[str]:
    """For each text the next one that is not empty."""
    following, after = [""] * len(texts), ""
    for place in range(len(texts) - 1, -1, -1):
        following[place] = after
        after = texts[place] or after
    return following


def _raw(value: Any) -> bytes:
    """``value`` as JSON, byte for byte equal only for equal values, NaN and null aside. Raises ``TypeError`` or
    ``ValueError``."""
    raw: bytes = orjson.dumps(value)
    return raw


def _equal(messages: Sequence[Any], raw: list[bytes], known: _Known) -> int:
    """How many first messages are known. Messages that were compared by their bytes add these to ``raw``."""
    length = min(len(messages), len(known.sent))
    if all(map(operator.is_, messages, known.sent)):
        return length
    for place in range(length):
        if messages[place] is known.sent[place]:
            continue
        while len(raw) <= place:
            raw.append(_raw(messages[len(raw)]))
        if raw[place] != known.raw[place]:
            return place
        if b"null" in raw[place] and _plain(messages[place]) != _plain(known.sent[place]):
            return place
    return length
