"""Mistral: chats and texts by ``mistral-common``, called as vLLM 0.32 calls it (``vllm/tokenizers/mistral.py``).

Its file, ``tekken.json`` or ``tokenizer.model.v*``, is vocabulary and format in one; there is no chat template.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gateway.block_keys import id_bytes
from gateway.tokens.edges import Edges
from gateway.tokens.errors import CannotCount, CannotLoad
from gateway.tokens.messages import conversation, tools_for_template
from gateway.types import ChatPrompt

# Longer ids are cut to their end, which is all that Mistral's formats allow.
_ID_CHARS = 9
_EFFORTS_SINCE = 15


class MistralEncoder:
    """Counts texts. Slow beside the others: 10 MB/s, with the GIL released."""

    name = "mistral-common"
    is_fast = False
    kept_bytes = 0
    edges: Edges | None = None

    def __init__(self, file: Path) -> None:
        try:
            from mistral_common.protocol.instruct.validator import ValidationMode
            from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
        except ImportError:
            raise CannotLoad("its chats are rendered by mistral-common, which kvgate[families] installs") from None
        self.tokenizer: Any = MistralTokenizer.from_file(str(file), mode=ValidationMode.test)
        self._texts: Any = self.tokenizer.instruct_tokenizer.tokenizer
        self.version = int(str(self._texts.version.value).rpartition("v")[2])

    def count(self, text: str, add_special_tokens: bool) -> int:
        """Tokens of ``text``. Raises ``CannotCount``."""
        try:
            return len(self.ids(text, add_special_tokens))
        except UnicodeEncodeError as error:
            raise CannotCount(f"the text is not valid Unicode: {error.reason}", refused=True) from None

    def ids(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of ``text``."""
        return list(self._texts.encode(text, bos=add_special_tokens, eos=False))

    def id_bytes(self, text: str, add_special_tokens: bool) -> bytes:
        """Token ids as bytes."""
        try:
            return id_bytes(self.ids(text, add_special_tokens))
        except UnicodeEncodeError as error:
            raise CannotCount(f"the text is not valid Unicode: {error.reason}", refused=True) from None

    def strings(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary's entries for ``ids``."""
        return [self._texts.id_to_piece(token) for token in ids]


class MistralChats:
    """Counts chats."""

    name = "mistral-common"
    is_text = False
    tokenize_differs = True
    truncates = True
    uses_template = False

    def __init__(self, encoder: MistralEncoder) -> None:
        self._encoder = encoder

    def tokens(self, prompt: ChatPrompt, variables: Mapping[str, Any]) -> int:
        """Prompt tokens. Raises ``CannotCount``."""
        return len(self._ids(prompt, variables))

    def render(self, prompt: ChatPrompt, variables: Mapping[str, Any]) -> str:
        """The prompt as text, special tokens spelled out. Raises ``CannotCount``."""
        from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy

        ids = self._ids(prompt, variables)
        text: str = self._encoder.tokenizer.decode(ids, special_token_policy=SpecialTokenPolicy.KEEP)
        return text

    def _ids(self, prompt: ChatPrompt, variables: Mapping[str, Any]) -> list[int]:
        if prompt.chat_template is not None or prompt.chat_template_kwargs:
            raise CannotCount("Mistral's formats take neither a chat template nor arguments for one", refused=True)
        conversation(prompt.messages, "string")  # vLLM reads them this way too, and refuses what it cannot
        messages = [_adapted(message) for message in prompt.messages]
        continued = bool(variables.get("continue_final_message"))
        last_role = messages[-1]["role"]
        if variables.get("add_generation_prompt") and last_role == "assistant":
            raise CannotCount("the last message is an answer already", refused=True)
        if continued and last_role != "assistant":
            raise CannotCount("the last message is no answer that could be continued", refused=True)
        effort = {"reasoning_effort": variables.get("reasoning_effort")} if self._takes_effort else {}
        return self._encoded(messages, tools_for_template(prompt.tools), continued, effort)

    @property
    def _takes_effort(self) -> bool:
        return self._encoder.version >= _EFFORTS_SINCE

    def _encoded(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        continued: bool,
        effort: Mapping[str, Any],
    ) -> list[int]:
        from mistral_common.protocol.instruct.request import ChatCompletionRequest

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                request = ChatCompletionRequest.from_openai(
                    messages=messages, tools=tools, continue_final_message=continued, **effort
                )
                ids: list[int] = self._encoder.tokenizer.encode_chat_completion(request).tokens
        except Exception as error:  # assertions among them: vLLM answers 400 to all
            text = " ".join(str(error).split())[:200] or type(error).__name__
            raise CannotCount(f"mistral-common refuses the messages: {text}") from error
        return ids


def _adapted(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as vLLM 0.32 hands it on: reasoning under one name, short ids, arguments as objects."""
    adapted = dict(message)
    reasoning = adapted.pop("reasoning_content", None)
    if reasoning is not None and adapted.get("reasoning") is None:
        adapted["reasoning"] = reasoning
    role = adapted.get("role")
    if role == "assistant":
        adapted["tool_calls"] = [_short(call, "id") for call in adapted.get("tool_calls") or ()]
    elif role == "tool" and "tool_call_id" in adapted:
        adapted = _short(adapted, "tool_call_id")
    content = adapted.get("content")
    if isinstance(content, list):
        adapted["content"] = [part for part in content if not isinstance(part, Mapping) or part.get("type")]
    return adapted


def _short(mapping: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {**mapping, key: mapping[key][-_ID_CHARS:]}
