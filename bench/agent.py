"""A coding agent's conversation that grows turn by turn, with the vocabulary of real code: Python's own library."""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SYSTEM = """You are a coding agent working in a checked-out repository on the user's machine. You read files, search \
them, run commands and edit code with the tools below until the task is done.

# How to work
- Look before you change: read the code around a place before you edit it, and the tests that cover it.
- Call tools in parallel when the calls do not depend on each other.
- Keep edits small. Follow the style of the file: names, quotes, line length, comments.
- Never invent a path, a flag or a function. If you are not sure that it exists, search for it.
- Run the tests that cover what you changed before you say that it works.
- Do not commit unless you are asked to. Never print secrets.

# How to answer
Answer in short paragraphs. Cite places as path:line. When the task is done, say what changed and how you checked it.
"""
_TOOLS: tuple[tuple[str, str, dict[str, Any], list[str]], ...] = (
    (
        "read_file",
        "Read a file of the repository. Lines are numbered from 1. Long files are cut; ask for a range then.",
        {
            "path": {"type": "string", "description": "Path relative to the repository's root"},
            "start_line": {"type": "integer", "minimum": 1, "description": "First line to show"},
            "end_line": {"type": "integer", "minimum": 1, "description": "Last line to show, inclusive"},
        },
        ["path"],
    ),
    (
        "search",
        "Search file contents with a regular expression (ripgrep syntax) and show matching lines.",
        {
            "pattern": {"type": "string", "description": "Regular expression, e.g. `def \\w+_handler\\(`"},
            "glob": {"type": "string", "description": "Only files whose path matches, e.g. `**/*.py`"},
            "context_lines": {"type": "integer", "default": 0, "maximum": 10},
        },
        ["pattern"],
    ),
    (
        "edit_file",
        "Replace one exact occurrence of a text in a file. Fails if the text occurs never or more than once.",
        {
            "path": {"type": "string"},
            "old": {"type": "string", "description": "The text to replace, with enough lines to be unique"},
            "new": {"type": "string", "description": "What stands there afterwards"},
        },
        ["path", "old", "new"],
    ),
    (
        "run",
        "Run a shell command in the repository's root and return its output and exit status.",
        {
            "command": {"type": "string"},
            "timeout_s": {"type": "number", "default": 120, "description": "Killed after so many seconds"},
            "env": {"type": "object", "additionalProperties": {"type": "string"}},
        },
        ["command"],
    ),
    (
        "list_files",
        "List files and folders below a path, as `git ls-files` would.",
        {"path": {"type": "string", "default": "."}, "depth": {"type": "integer", "default": 2}},
        [],
    ),
    (
        "update_plan",
        "Write down the steps of the task and which of them are done.",
        {
            "steps": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "text": {"type": "string"},
                        "status": {"type": "string", "enum": ["pending", "in_progress", "done"]},
                    },
                    "required": ["text", "status"],
                },
            }
        },
        ["steps"],
    ),
)
_THOUGHTS = (
    "The caller passes the value through unchanged, so the check has to be here. I'll look at how it is used.",
    "Two places could be at fault. I'll read both before I change anything.",
    "That explains the traceback: the attribute is only set when the first branch is taken.",
    "The tests cover the happy path only. I'll search for other users of this function.",
    "This looks right. Next, the part that parses the arguments; it may rely on the old order.",
    "I'll make the smallest change that keeps the public interface, then run the tests of this module.",
)
_QUESTIONS = (
    "Thanks. Does the same problem exist anywhere else in this module? Please check before you go on.",
    "OK. And what about subclasses that override it? They must keep working.",
    "Good. Please also look at how errors are reported there; users complained that the message says nothing.",
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Requests of one conversation: ``messages[: ends[turn]]`` are those of the turn's request."""

    messages: list[dict[str, Any]]
    ends: list[int]
    tools: list[dict[str, Any]]

    def body(self, turn: int, model: str) -> bytes:
        """The request body of a turn (0 is the first), as an OpenAI client library writes it."""
        document = {
            "messages": self.messages[: self.ends[turn]],
            "model": model,
            "max_tokens": 4096,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.2,
            "tools": self.tools,
        }
        return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()


def agent_conversation(seed: int, turns: int, growth_bytes: int) -> Conversation:
    """A conversation of ``turns`` requests, each about ``growth_bytes`` longer than the one before.

    Tool results are pieces of the running Python's standard library. The same arguments give the same conversation
    (with the same Python).
    """
    dice = random.Random(seed)
    pieces = _code(dice)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": f"Task {seed}: tests fail after the last refactoring. Find out why and fix it."},
    ]
    ends = [len(messages)]
    for turn in range(1, turns):
        messages += _turn(dice, pieces, turn, growth_bytes)
        ends.append(len(messages))
    return Conversation(messages, ends, [_tool(*tool) for tool in _TOOLS])


def _turn(dice: random.Random, pieces: Iterator[tuple[str, str]], turn: int, growth_bytes: int) -> list[dict[str, Any]]:
    """What one step of the agent adds: calls (some in parallel) and their results; now and then the user speaks."""
    parallel = dice.choice((1, 1, 2, 3))
    calls, results = [], []
    for number in range(parallel):
        path, code = next(pieces)
        code = code[: growth_bytes // parallel]
        call_id = f"call_{dice.getrandbits(96):024x}"
        name, arguments = dice.choice(
            (
                ("read_file", {"path": path, "start_line": dice.randint(1, 90), "end_line": dice.randint(91, 400)}),
                ("search", {"pattern": f"def \\w*{Path(path).stem}\\(", "glob": "**/*.py", "context_lines": 3}),
                ("run", {"command": f"python -m pytest -q tests/test_{Path(path).stem}.py -k 'not slow' | tail -40"}),
                ("edit_file", {"path": path, "old": code[:120], "new": code[:60] + "\n    # checked\n" + code[60:120]}),
            )
        )
        calls.append(
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        )
        results.append({"role": "tool", "tool_call_id": call_id, "content": code or f"({number} lines)"})
    said = f"{dice.choice(_THOUGHTS)} (step {turn})" if dice.random() < 0.7 else None
    messages: list[dict[str, Any]] = [{"role": "assistant", "content": said, "tool_calls": calls}, *results]
    if turn % 13 == 0:
        messages.append({"role": "assistant", "content": f"Fixed in step {turn}; the tests of this module pass now."})
        messages.append({"role": "user", "content": dice.choice(_QUESTIONS)})
    return messages


def _code(dice: random.Random) -> Iterator[tuple[str, str]]:
    """Pieces of the standard library, none twice until all were given."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(file for file in folder.glob("*.py") if 8_000 < file.stat().st_size < 120_000)
    while True:
        dice.shuffle(files)
        for file in files:
            text = file.read_text(encoding="utf-8", errors="replace")
            start = dice.randint(0, len(text) // 2)
            start = text.find("\n", start) + 1
            yield f"src/{file.name}", text[start:]


def _tool(name: str, description: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}
