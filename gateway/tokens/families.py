"""Which models have chats that are rendered by code instead of a template, and what counts them here.

Facts: vLLM 0.32's ``config/model.py`` and ``renderers/registry.py`` (by architecture), ``tokenizers/registry.py``
(Mistral, by the files of a repository).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from gateway.tokens.clock import BackendClock
from gateway.tokens.deepseek_v4 import DeepseekV4
from gateway.tokens.deepseek_v32 import DeepseekV32
from gateway.tokens.encoder import Encoder
from gateway.tokens.errors import CannotLoad
from gateway.tokens.harmony import HarmonyChats
from gateway.tokens.mistral import MistralChats, MistralEncoder
from gateway.tokens.own import OwnChats, TextChats

_V4 = ("DeepSeek V4's format", DeepseekV4)
_TEXT_FORMATS: Mapping[str, tuple[str, Callable[[], Any]]] = {
    "DeepseekV32ForCausalLM": ("DeepSeek V3.2's format", DeepseekV32),
    "DeepseekV4ForCausalLM": _V4,
    "DeepseekV4ForConditionalGeneration": _V4,
}
_UNKNOWN_FORMATS = {
    "DeepseekV41ForCausalLM": "vLLM's DeepSeek V4.1 encoder",
    "KimiK3ForConditionalGeneration": "vLLM's Kimi-K3 encoder",
    "MoonshotKimiaForCausalLM": "vLLM's Kimi-Audio encoder",
    "InklingForCausalLM": "vLLM's Inkling encoder",
    "InklingForConditionalGeneration": "vLLM's Inkling encoder",
}
_MISTRAL_FILES = ("tekken.json", *(f"tokenizer.model.{version}" for version in ("v15", "v13", "v11", "v7", "v3", "v2")))


class Files(Protocol):
    """The files of a model's repository."""

    source: str

    def json(self, name: str) -> Mapping[str, Any]:
        """A JSON file's object; empty if there is none."""

    def path(self, name: str) -> Path | None:
        """A file on this machine; ``None`` if there is none."""


def own_chats(files: Files, encoder: Encoder, clock: BackendClock) -> OwnChats | None:
    """Who counts the chats of a model that has no use for a template; ``None`` where a template is rendered.

    Raises ``CannotLoad`` with the reason why they cannot be counted here.
    """
    architectures = files.json("config.json").get("architectures")
    for name in architectures if isinstance(architectures, list) else ():
        if name == "GptOssForCausalLM":
            return HarmonyChats(getattr(encoder, "count_ordinary", None), clock)
        if name in _TEXT_FORMATS:
            label, form = _TEXT_FORMATS[name]
            return TextChats(label, form(), encoder)
        if name in _UNKNOWN_FORMATS:
            raise CannotLoad(f"its chats are rendered by {_UNKNOWN_FORMATS[name]}")
    return MistralChats(encoder) if isinstance(encoder, MistralEncoder) else None


def mistral_file(files: Files) -> Path | None:
    """The tokenizer file for ``mistral-common``, if vLLM would use it: where the weights are in Mistral's format.

    A folder without any weights is taken for one if it has no other tokenizer.
    """
    file = next((path for name in _MISTRAL_FILES if (path := files.path(name)) is not None), None)
    if file is None:
        return None
    folder = Path(files.source)
    if folder.is_dir():
        consolidated = any(folder.glob("consolidated*.safetensors"))
        return file if consolidated or not (folder / "tokenizer.json").is_file() else None
    return file if _has_consolidated_weights(files.source) else None


def _has_consolidated_weights(repository: str) -> bool:
    """Asks the hub for the list of files, once a load. Without an answer: a repository with such a file has them."""
    try:
        from huggingface_hub import list_repo_files

        return any(name.startswith("consolidated") for name in list_repo_files(repository))
    except Exception:  # no network, no such repository: the probe against a backend finds a mistake
        return True
