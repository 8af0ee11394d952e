"""Samples of a few families out of a Prometheus page, without decoding or parsing the rest of it. Nothing raises.

A vLLM server exports up to some hundred kilobytes of histograms. One regular expression finds the lines wanted, in
bytes; labels are looked at only where somebody asks for them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

# A line longer than this is no sample; labels of it could cost any time.
MAX_LINE_BYTES = 1 << 16

# The usual form: no escapes in labels, no blanks between them. Anything else takes the slow way.
_PLAIN = re.compile(rb'\{((?:[a-zA-Z_][a-zA-Z0-9_]*="[^"\\\n]*",?)*)\}[ \t]+(\S+)')
_ENGINE = re.compile(rb'(?:^|,)engine="([^"]*)"')
_LABEL = re.compile(r'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*)"[ \t]*')
_ESCAPE = re.compile(r"\\(.)")
_ESCAPED = {"n": "\n"}
_BLANKS = b" \t"

# Lines of samples by family: each is what follows the name.
Page = Mapping[str, list[bytes]]


class Families:
    """The names that are looked for. One regular expression for all of them, made once."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        self._wanted = re.compile(rb"\n(" + _choice([name.encode() for name in self.names]) + rb")([{ \t][^\n]*)")

    def find(self, body: bytes) -> dict[str, list[bytes]]:
        """The lines of exactly these names, in their order. Families that are not there are missing."""
        found: dict[str, list[bytes]] = {}
        for name, rest in self._wanted.findall(b"\n" + body):
            if len(rest) <= MAX_LINE_BYTES:
                found.setdefault(name.decode(), []).append(rest)
        return found


def _choice(names: list[bytes]) -> bytes:
    """A regular expression for any of ``names`` that decides letter by letter: most lines end at the first few."""
    heads: dict[bytes, list[bytes]] = {}
    for name in names:
        heads.setdefault(name[:1], []).append(name[1:])
    choices = []
    for head, rests in heads.items():
        choices.append(re.escape(head) + (_choice(rests) if head and any(rests) else b""))
    return choices[0] if len(choices) == 1 else b"(?:" + b"|".join(choices) + b")"


def engine_and_value(rest: bytes) -> tuple[str, float] | None:
    """The ``engine`` label (V0 has none and counts as engine 0) and the value; ``None`` for a garbled line."""
    plain = _PLAIN.match(rest)
    if plain is None:
        sample = labels_and_value(rest)
        return None if sample is None else (sample[0].get("engine", "0"), sample[1])
    value = _number(plain[2])
    if value is None:
        return None
    engine = _ENGINE.search(plain[1])
    return ("0" if engine is None else engine[1].decode("utf-8", "replace")), value


def value_of(rest: bytes) -> float | None:
    """The value alone, whatever the labels are; ``None`` for a garbled line."""
    words = (rest[rest.rfind(b"}") + 1 :] if rest[:1] == b"{" else rest).split(None, 1)
    return _number(words[0]) if words else None


def labels_and_value(rest: bytes) -> tuple[dict[str, str], float] | None:
    """All labels and the value; ``None`` for a garbled line."""
    end = _end_of_labels(rest)
    if end is None:
        return None
    labels, position = end
    words = rest[position:].split(None, 1)
    value = _number(words[0]) if words else None
    return None if value is None else (dict(labels), value)


@lru_cache(maxsize=128)
def labels_of(rest: bytes) -> Mapping[str, str] | None:
    """The labels of a line that is likely to come again just so, such as an info gauge's. Not to be changed."""
    end = _end_of_labels(rest)
    return None if end is None else end[0]


def _end_of_labels(rest: bytes) -> tuple[dict[str, str], int] | None:
    """The labels and where they end in ``rest``; ``None`` if they do not."""
    labels: dict[str, str] = {}
    if rest[:1] != b"{":
        # Without a blank it is a longer name that begins with ours.
        return (labels, 0) if rest[:1] and rest[:1] in _BLANKS else None
    # Latin-1 keeps positions; values are decoded one by one.
    text, position = rest.decode("latin-1"), 1
    while match := _LABEL.match(text, position):
        raw = match[2]
        if not raw.isascii():
            raw = raw.encode("latin-1").decode("utf-8", "replace")
        labels[match[1]] = _ESCAPE.sub(_unescape, raw) if "\\" in raw else raw
        position = match.end()
        if text[position : position + 1] == ",":
            position += 1
    while text[position : position + 1] in (" ", "\t"):
        position += 1
    return (labels, position + 1) if text[position : position + 1] == "}" else None


def _number(word: bytes) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _unescape(match: re.Match[str]) -> str:
    return _ESCAPED.get(match[1], match[1])
