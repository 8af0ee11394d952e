"""gpt-oss: chats in the Harmony format, as vLLM 0.32 builds and renders them (``entrypoints/openai/parser``).

``oss-harmony`` renders system and developer messages and the frames of the others; the texts within are encoded by the
model's tokenizer where that proves itself equal, since it is fifty times as fast. Frames and preambles are remembered.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.tokens.clock import BackendClock
from gateway.tokens.encoder import corpus
from gateway.tokens.errors import CannotCount, CannotLoad
from gateway.tokens.harmony_messages import Said, chat_messages, response_messages, without_old_thoughts
from gateway.tokens.lru import Lru
from gateway.types import ChatPrompt

CountOrdinary = Callable[[str], int]

_EFFORTS = {"low": "Low", "medium": "Medium", "high": "High"}
_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class _Preamble:
    """What stands before the conversation: ``tools`` are functions as JSON, ``None`` where there are none."""

    effort: str | None
    date: str
    instructions: str | None
    tools: str | None


class HarmonyChats:
    """Counts chats for gpt-oss. Raises ``CannotLoad`` where ``oss-harmony`` is not installed.

    ``ordinary`` counts a text in which no special token is recognised; ``None`` if there is no fast way.
    """

    name = "oss-harmony"
    is_text = False
    tokenize_differs = True
    truncates = False
    uses_template = True

    def __init__(self, ordinary: CountOrdinary | None, clock: BackendClock) -> None:
        try:
            import openai_harmony
        except ImportError:
            raise CannotLoad(
                "its chats are rendered by openai-harmony: install oss-harmony (kvgate[families])"
            ) from None
        self._harmony = openai_harmony
        self._encoding = openai_harmony.load_harmony_encoding("HarmonyGptOss")
        self._clock = clock
        self._frames: Lru[tuple[str | None, ...], int] = Lru(_REMEMBERED)
        self._preambles: Lru[_Preamble, int] = Lru(64)
        self._developers: Lru[str, int] = Lru(_REMEMBERED)
        self._ordinary: CountOrdinary = self._slowly
        if ordinary is not None and all(ordinary(text) == self._slowly(text) for text in corpus([])):
            self._ordinary = ordinary
        # The generation opens with <|start|>assistant.
        empty = openai_harmony.Conversation.from_messages([])
        role = openai_harmony.Role.ASSISTANT
        self._opening_tokens = len(self._encoding.render_conversation_for_completion(empty, role))

    def tokens(self, prompt: ChatPrompt, variables: Mapping[str, Any]) -> int:
        """Prompt tokens. Raises ``CannotCount``."""
        try:
            preamble, said = self._read(prompt)
            total = self._preamble_tokens(preamble) + self._opening_tokens
            return total + sum(map(self._tokens_of, without_old_thoughts(said)))
        except CannotCount:
            raise
        except UnicodeEncodeError as error:
            raise CannotCount(f"the text is not valid Unicode: {error.reason}", refused=True) from None
        except Exception as error:  # anything the library raises: vLLM would fail as well
            raise CannotCount(f"Harmony cannot render the messages: {error}") from error

    def render(self, prompt: ChatPrompt, variables: Mapping[str, Any]) -> str:
        """The messages as text. Raises ``CannotCount``."""
        preamble, said = self._read(prompt)
        return f"{preamble}\n" + "\n".join(map(str, without_old_thoughts(said)))

    def _read(self, prompt: ChatPrompt) -> tuple[_Preamble, list[Said]]:
        if prompt.responses is not None:
            instructions, tools, said = response_messages(prompt.responses)
        else:
            instructions, tools, said = chat_messages(prompt)
        effort = prompt.reasoning_effort
        if effort is not None and effort not in _EFFORTS:
            raise CannotCount(f"Harmony knows no reasoning effort {effort!r}", refused=True)
        as_json = json.dumps(tools, ensure_ascii=False) if tools else None
        return _Preamble(effort, self._clock.today(), instructions, as_json), said

    def _preamble_tokens(self, preamble: _Preamble) -> int:
        known = self._preambles.get(preamble)
        if known is None:
            known = self._rendered_preamble(preamble)
            self._preambles.put(preamble, known)
        return known

    def _rendered_preamble(self, preamble: _Preamble) -> int:
        harmony = self._harmony
        system = harmony.SystemContent.new().with_conversation_start_date(preamble.date)
        if preamble.effort is not None:
            system = system.with_reasoning_effort(harmony.ReasoningEffort(_EFFORTS[preamble.effort]))
        messages = [harmony.Message.from_role_and_content(harmony.Role.SYSTEM, system)]
        tools = json.loads(preamble.tools) if preamble.tools is not None else []
        if preamble.instructions or tools:
            messages.append(self._developer(preamble.instructions, tools))
        conversation = harmony.Conversation.from_messages(messages)
        return len(self._encoding.render_conversation(conversation))

    def _developer(self, instructions: str | None, tools: Sequence[Mapping[str, Any]]) -> Any:
        content = self._harmony.DeveloperContent.new()
        if instructions is not None:
            content = content.with_instructions(instructions)
        functions = [
            self._harmony.ToolDescription.new(
                name=tool["name"], description=tool.get("description") or "", parameters=tool.get("parameters")
            )
            for tool in tools
        ]
        if functions:
            content = content.with_function_tools(functions)
        return self._harmony.Message.from_role_and_content(self._harmony.Role.DEVELOPER, content)

    def _tokens_of(self, said: Said) -> int:
        if said.role == "developer":
            text = said.texts[0]
            known = self._developers.get(text)
            if known is None:
                known = len(self._encoding.render(self._developer(text, ())))
                self._developers.put(text, known)
            return known
        return self._frame_tokens(said) + sum(map(self._ordinary, said.texts))

    def _frame_tokens(self, said: Said) -> int:
        """Tokens of a message less its text."""
        key = (said.role, said.name, said.channel, said.recipient, said.content_type)
        known = self._frames.get(key)
        if known is None:
            harmony = self._harmony
            role = harmony.Role(said.role)
            author = harmony.Author.new(role, said.name) if said.name is not None else harmony.Author(role=role)
            message = harmony.Message(author=author, content=[harmony.TextContent(text="")])
            message.channel, message.recipient, message.content_type = said.channel, said.recipient, said.content_type
            known = self._legacy_tokens(self._encoding.render(message))
            self._frames.put(key, known)
        return known

    def _legacy_tokens(self, frame: list[int]) -> int:
        """Tokens of a frame once vLLM 0.32 has moved a tool call's recipient to where gpt-oss was trained to have it.

        ``assistant<|channel|>commentary to=functions.f <|constrain|>json`` becomes
        ``assistant to=functions.f<|channel|>commentary json``.
        """
        marks = [self._special(name) for name in ("<|channel|>", "<|constrain|>", "<|message|>")]
        if not all(mark in frame for mark in marks):
            return len(frame)
        channel_at, constrain_at, message_at = (frame.index(mark) for mark in marks)
        author = self._encoding.decode(frame[1:channel_at])
        where = self._encoding.decode(frame[channel_at + 1 : constrain_at])
        kind = self._encoding.decode(frame[constrain_at + 1 : message_at])
        channel, to, recipient = where.removesuffix(" ").partition(" to=")
        if author != "assistant" or not where.endswith(" ") or not to or not channel or not recipient or not kind:
            return len(frame)
        header = self._slowly(f"assistant to={recipient}") + self._slowly(f"{channel} {kind}") + 3
        return header + len(frame) - message_at - 1

    def _special(self, token: str) -> int:
        return int(self._encoding.encode(token, allowed_special="all")[0])

    def _slowly(self, text: str) -> int:
        text.encode()  # a lone surrogate, which vLLM refuses, would be replaced
        return len(self._encoding.encode(text, disallowed_special=()))
