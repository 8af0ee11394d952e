"""Text to a number of tokens, by the fastest encoder that proves itself equal to Hugging Face's.

``fastokens`` encodes 60,000 tokens in 2 ms the first time and in 0.2 ms when it has seen most of the text, with the GIL
released; so no counts of segments are kept here. It remembers the text segments between special tokens itself, in a
bounded memory.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Protocol

from gateway.block_keys import from_little_endian, id_bytes
from gateway.tokens.edges import Edges, edges_of
from gateway.tokens.errors import CannotCount


class Encoder(Protocol):
    """Counts tokens of a text. Safe to call from several threads.

    ``name`` says who does the work; ``is_fast``: 20 kB take far less than a millisecond; ``edges``: where texts can be
    cut.
    """

    @property
    def kept_bytes(self) -> int:
        """Memory taken by what it remembers of texts."""

    name: str
    is_fast: bool
    edges: Edges | None

    def count(self, text: str, add_special_tokens: bool) -> int:
        """Tokens of ``text``. Raises ``CannotCount`` for text that no tokenizer takes (lone surrogates)."""

    def ids(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of ``text``. May raise what the tokenizer raises."""

    def id_bytes(self, text: str, add_special_tokens: bool) -> bytes:
        """The same in the form of ``block_keys.id_bytes``. Raises ``CannotCount`` as ``count`` does."""

    def strings(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary's entries for ``ids``, as they stand there."""


class FastEncoder:
    """``fastokens`` over the tokenizer's own ``tokenizer.json``."""

    name = "fastokens"
    is_fast = True

    def __init__(self, tokenizer_json: str, cache_bytes: int) -> None:
        import fastokens

        self.edges: Edges | None = None
        self._tokenizer = fastokens.Tokenizer.from_json_str(tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if cache_bytes:
            self._tokenizer.enable_segment_cache(cache_bytes)

    def count(self, text: str, add_special_tokens: bool) -> int:
        try:
            return len(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
        except UnicodeEncodeError as error:
            raise CannotCount(f"the text is not valid Unicode: {error.reason}", refused=True) from None

    @property
    def kept_bytes(self) -> int:
        """Of the segment cache: texts and ids."""
        stats = self._tokenizer.segment_cache_stats()
        return int(stats["bytes"]) if stats else 0

    def count_ordinary(self, text: str) -> int:
        """Tokens of a text in which no special token is recognised."""
        return len(self._tokenizer.encode_ordinary(text))

    def ids(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of ``text``."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def id_bytes(self, text: str, add_special_tokens: bool) -> bytes:
        """Token ids as bytes: no object is made for each, so it takes no longer than ``count``."""
        try:
            ids, _ = self._tokenizer.encode_batch_flat([text], add_special_tokens=add_special_tokens)
        except UnicodeEncodeError as error:
            raise CannotCount(f"the text is not valid Unicode: {error.reason}", refused=True) from None
        return from_little_endian(ids)

    def strings(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary's entries for ``ids``."""
        return [self._tokenizer.id_to_token(token) or "" for token in ids]


class ReferenceEncoder:
    """The transformers tokenizer itself, as vLLM calls it: the reference, and slow."""

    name = "transformers"
    is_fast = False

    def __init__(self, tokenizer: Any) -> None:
        self.edges: Edges | None = None
        self._tokenizer = tokenizer
        # Of the Rust tokenizers' methods only the batch ones release the GIL; the Python ones never do.
        self._backend = getattr(tokenizer, "backend_tokenizer", None) if tokenizer.is_fast else None

    @property
    def kept_bytes(self) -> int:
        """It remembers nothing that grows."""
        return 0

    def count(self, text: str, add_special_tokens: bool) -> int:
        try:
            if self._backend is None:
                return len(self.ids(text, add_special_tokens))
            encodings = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return len(encodings[0].ids)
        except (TypeError, UnicodeEncodeError) as error:
            raise CannotCount(f"the text is not valid Unicode: {error}", refused=True) from None

    def ids(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of ``text``."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def id_bytes(self, text: str, add_special_tokens: bool) -> bytes:
        """Token ids as bytes."""
        try:
            return id_bytes(self.ids(text, add_special_tokens))
        except (TypeError, UnicodeEncodeError) as error:
            raise CannotCount(f"the text is not valid Unicode: {error}", refused=True) from None

    def strings(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary's entries for ``ids``."""
        return [str(entry) for entry in self._tokenizer.convert_ids_to_tokens(list(ids))]


def best_encoder(tokenizer: Any, cache_bytes: int) -> tuple[Encoder, str]:
    """The fastest exact encoder for a transformers tokenizer, and a few words on why it is that one.

    Blocks for up to a second or two: it loads the vocabulary again and encodes a corpus with both.
    """
    reference = ReferenceEncoder(tokenizer)
    if not tokenizer.is_fast:
        return reference, "it has no tokenizer.json"
    texts = corpus([str(token) for token in tokenizer.added_tokens_encoder][:400])
    tokenizer_json = tokenizer.backend_tokenizer.to_str()
    encoder, note = _faster(reference, tokenizer_json, texts, cache_bytes)
    try:
        encoder.edges = edges_of(tokenizer_json, lambda text: encoder.count(text, False), texts)
    except (LookupError, TypeError, ValueError):  # not laid out as tokenizer files are: then texts are not cut
        encoder.edges = None
    return encoder, note


def _faster(
    reference: ReferenceEncoder, tokenizer_json: str, texts: list[str], cache_bytes: int
) -> tuple[FastEncoder | ReferenceEncoder, str]:
    try:
        fast = FastEncoder(tokenizer_json, cache_bytes)
        for text in texts:
            for add_special_tokens in (False, True):
                ours, theirs = fast.ids(text, add_special_tokens), reference.ids(text, add_special_tokens)
                counted, flat = fast.count(text, add_special_tokens), fast.id_bytes(text, add_special_tokens)
                if ours != theirs or counted != len(theirs) or flat != id_bytes(theirs):
                    return reference, f"fastokens differs on {text[:40]!r}"
    except Exception as error:  # a vocabulary fastokens does not know is no reason to fail
        return reference, f"fastokens cannot take it: {error}"
    return fast, f"equal to transformers on {len(texts)} texts"


def corpus(special_tokens: list[str]) -> list[str]:
    """Texts on which two tokenizers would differ if they did at all: about 60 kB, the same on every call."""
    dice = random.Random(20261130)
    texts = [*_SAMPLES, *(sample * 7 for sample in _SAMPLES)]
    for low, high in _RANGES * 4:
        texts.append("".join(chr(dice.randint(low, high)) for _ in range(dice.randint(1, 60))))
    pieces = [*special_tokens, *_SAMPLES, " ", "\n", "  \n\n", "\t", "<|", "|>", "</", "é", "e\u0301", "\u200d"]
    texts += ["".join(dice.choice(pieces) for _ in range(dice.randint(1, 6))) for _ in range(150)]
    return [*special_tokens, *texts]


_RANGES = (
    (0x20, 0x7E),
    (0xA0, 0x24F),
    (0x300, 0x36F),
    (0x370, 0x5FF),
    (0x900, 0xDFF),
    (0x2000, 0x206F),
    (0x3040, 0x30FF),
    (0x4E00, 0x9FFF),
    (0xAC00, 0xD7A3),
    (0x1D400, 0x1D7FF),
    (0x1F300, 0x1FAFF),
)
_SAMPLES = (
    "",
    " ",
    "a",
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog. 1234567890 3.14159 1,000,000",
    "def f(x: int) -> str:\n    return f'{x!r:>10}'\n\n\nclass A:\n\tpass\n",
    '{"name": "get_weather", "arguments": {"city": "São Paulo", "days": [1, 2, 3], "unit": null}}',
    "    if (a != b && c <= d || !e) { x->y[0] += ~z; } // comment\r\n\r\n\t\t/* block */\r\n",
    "I'll don't we've they'RE it'S CAN'T you'd\u2019s",
    "你好，世界。这是一个测试。日本語のテキストとカタカナ。한국어 문장입니다.",
    "مرحبا بالعالم שלום עולם नमस्ते दुनिया สวัสดีชาวโลก Здравствуй, мир Γειά σου",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷🇯🇵 👍🏽 ❤️ e\u0301 n\u0303 \u00c5 \u212b \ufb01 \u1e9b\u0323",
    "\u00a0\u2003\u3000\ufeff\u200b\u202e\u00ad \u2028\u2029",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "=" * 80 + "\n" + "-" * 79 + "\n\n\n\n\n",
    "https://example.com/a/b?c=d&e=%20f#g user@example.com C:\\Users\\x\\y.txt 0xDEADBEEF 1e-10",
    "<|im_start|><|im_end|><s></s><think>\n\n</think><tool_call>[INST] <<SYS>> <bos><start_of_turn>",
    "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋, α ∧ ¬β = ¬(¬α ∨ β), 2H₂ + O₂ ⇌ 2H₂O, R = 4.7 kΩ",
    "\x00\x01\x07\x1b[31mred\x1b[0m\x7f",
    "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9P",
)
