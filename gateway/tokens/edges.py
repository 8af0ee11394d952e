"""Where a text may be cut so that the tokens of its parts add up to its own.

A tokenizer first looks for its added tokens (``<|im_start|>``) in the raw text and then encodes what lies between by
itself. So a cut right before or after an added token costs nothing, if that token is certain to be found there whatever
stands around it. ``edges_of`` keeps only such tokens, and holds the claim against the encoder on made-up texts.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Sequence
from typing import Any


class Edges:
    """Added tokens that are found wherever they stand. ``before``: a cut before them is clean; ``after``: one after."""

    def __init__(self, before: frozenset[str], after: frozenset[str]) -> None:
        self._before = before
        self._after = after
        self._before_lengths = sorted({len(token) for token in before})
        self._after_lengths = sorted({len(token) for token in after})
        # Most texts are done with at their first or last character.
        self._first = frozenset(token[0] for token in before)
        self._last = frozenset(token[-1] for token in after)

    def start_clean(self, text: str) -> bool:
        """Whether a cut right before ``text`` is clean whatever comes before."""
        return text[:1] in self._first and any(text[:length] in self._before for length in self._before_lengths)

    def end_clean(self, text: str) -> bool:
        """Whether a cut right after ``text`` is clean whatever follows."""
        return text[-1:] in self._last and any(text[-length:] in self._after for length in self._after_lengths)


def edges_of(tokenizer_json: str, count: Callable[[str], int], texts: Sequence[str]) -> Edges | None:
    """The edges of a Hugging Face tokenizer, or ``None`` where texts cannot be cut.

    ``count`` counts a text's tokens, none added; ``texts`` are what the claim is tried on.
    """
    document = json.loads(tokenizer_json)
    if '"prepend_scheme":"first"' in json.dumps(document.get("pre_tokenizer"), separators=(",", ":")):
        return None  # SentencePiece models put a space before the first word of a text, not of every part
    raw = [token for token in document.get("added_tokens") or () if token.get("content") and not token["normalized"]]
    firm = _firm([token["content"] for token in raw])
    sound = [token for token in raw if token["content"] in firm and not token["single_word"] and not _is_spaced(token)]
    edges = Edges(
        frozenset(token["content"] for token in sound if not token["lstrip"]),
        frozenset(token["content"] for token in sound if not token["rstrip"]),
    )
    return edges if sound and _holds(edges, [token["content"] for token in sound], count, texts) else None


def _is_spaced(token: dict[str, Any]) -> bool:
    content = token["content"]
    return bool(content[0].isspace() or content[-1].isspace())


def _firm(tokens: list[str]) -> set[str]:
    """Those that no match of another token, begun earlier, can swallow or cut into."""
    ends = {token[start:] for token in tokens for start in range(1, len(token))}
    everything = "\x00".join(tokens)
    return {
        token
        for token in tokens
        if everything.count(token) == 1 and not any(token[:length] in ends for length in range(1, len(token)))
    }


def _holds(edges: Edges, tokens: list[str], count: Callable[[str], int], texts: Sequence[str]) -> bool:
    dice = random.Random(20261130)
    for token in itertools.islice(itertools.cycle(tokens), max(64, min(len(tokens), 400))):
        left, right = dice.choice(texts), dice.choice(texts)
        whole = count(left + token + right)
        if edges.start_clean(token) and whole != count(left) + count(token + right):
            return False
        if edges.end_clean(token) and whole != count(left + token) + count(right):
            return False
    return True
