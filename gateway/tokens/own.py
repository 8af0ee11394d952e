"""Chats that vLLM renders with code of its own instead of a chat template, and who counts them here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from gateway.tokens.encoder import Encoder
from gateway.tokens.messages import ContentFormat, Message, conversation, tools_for_template
from gateway.types import ChatPrompt


class OwnChats(Protocol):
    """Counts chats of one model. Blocking; safe to call from several threads. Both raise ``CannotCount``.

    ``variables``: the template kwargs of a request, merged. ``name`` says by whose rules it goes; ``is_text``: what
    ``render`` returns is what is encoded; ``tokenize_differs``: the server's ``/tokenize`` goes by other rules;
    ``truncates``: of chats, ``truncate_prompt_tokens`` is heeded;
    ``uses_template``: vLLM loads the model's chat template all the same (and asks it about system messages).
    """

    name: str
    is_text: bool
    tokenize_differs: bool
    truncates: bool
    uses_template: bool

    def tokens(self, prompt: ChatPrompt, variables: Mapping[str, Any]) -> int:
        """Prompt tokens."""

    def render(self, prompt: ChatPrompt, variables: Mapping[str, Any]) -> str:
        """The prompt as a text: for people to read, and to tell two prompts apart."""


class TextFormat(Protocol):
    """A prompt format that is code: takes what a chat template takes, and makes one text of it."""

    content_format: ContentFormat

    def render(self, messages: list[Message], tools: list[dict[str, Any]] | None, variables: Mapping[str, Any]) -> str:
        """The prompt. Raises ``CannotCount`` for chats that vLLM refuses."""


class TextChats:
    """Chats of a ``TextFormat``, encoded by the model's tokenizer."""

    is_text = True
    tokenize_differs = False
    truncates = True
    uses_template = False

    def __init__(self, name: str, form: TextFormat, encoder: Encoder) -> None:
        self.name = name
        self._form = form
        self._encoder = encoder

    def tokens(self, prompt: ChatPrompt, variables: Mapping[str, Any]) -> int:
        """Prompt tokens. Raises ``CannotCount``."""
        return self._encoder.count(self.render(prompt, variables), prompt.add_special_tokens)

    def render(self, prompt: ChatPrompt, variables: Mapping[str, Any]) -> str:
        """The text that is encoded. Raises ``CannotCount``."""
        messages = conversation(prompt.messages, self._form.content_format)
        return self._form.render(messages, tools_for_template(prompt.tools), variables)
