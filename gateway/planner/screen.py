"""Text for terminals of any width: wrapped sentences, and commands broken where a shell allows it."""

from __future__ import annotations

import shlex
import shutil
import textwrap

_NARROWEST, _WIDEST = 60, 100


def columns() -> int:
    """Columns to write in: the terminal's, 60 to 100; 100 when the output goes elsewhere."""
    return min(max(shutil.get_terminal_size((_WIDEST, 24)).columns, _NARROWEST), _WIDEST)


def wrapped(text: str, width: int, first: str = "", rest: str = "") -> str:
    """``text`` in lines of ``width``, the first after ``first``, the others after ``rest``; words are never split."""
    return textwrap.fill(
        text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def shell_lines(command: str, width: int, indent: str = "  ") -> str:
    """A shell command over several lines with backslashes, still one command when pasted."""
    words = shlex.split(command)
    if len(indent) + len(command) <= width:
        return indent + command
    lines, line = [], indent
    for word in (shlex.quote(word) if "=" not in word or word.startswith("-") else word for word in words):
        if line.strip() and len(line) + len(word) + 3 > width:
            lines.append(f"{line.rstrip()} \\")
            line = f"{indent}  "
        line += f"{word} "
    return "\n".join([*lines, line.rstrip()])
