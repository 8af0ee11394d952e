"""What the tests of counting share: asks, a backend that is a function, and a Llama-like tokenizer made on the spot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gateway.api import chat, completions
from gateway.types import Ask

LLAMA_TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
{{- '<|start|>' + message['role'] + '<|end|>' }}
{%- if message['content'] is string %}{{ message['content'] | trim }}
{%- else %}{% for part in message['content'] %}{{ part['text'] | trim }}{% endfor %}{% endif %}
{{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>' }}{% endif %}"""


def chat_ask(messages: list[Any], **fields: Any) -> Ask:
    return chat.parse(json.dumps({"model": "m", "messages": messages, **fields}).encode(), "application/json")


def text_ask(prompt: Any, **fields: Any) -> Ask:
    return completions.parse(json.dumps({"model": "m", "prompt": prompt, **fields}).encode(), "application/json")


class FakeBackend:
    """Answers ``/tokenize`` with ``answer``, or raises it whatever is asked, and remembers what it was asked.

    ``others``: answers of other endpoints by path; those not named are switched off, as vLLM's render endpoints are.
    """

    def __init__(
        self,
        answer: tuple[int, Mapping[str, Any]] | Exception,
        others: Mapping[str, tuple[int, Mapping[str, Any]]] | None = None,
    ) -> None:
        self.answer = answer
        self.others = others or {}
        self.asked: list[tuple[str, Any, Mapping[str, str]]] = []

    async def post(
        self, url: str, body: Any, headers: Mapping[str, str], timeout_s: float
    ) -> tuple[int, Mapping[str, Any]]:
        self.asked.append((url, body, headers))
        if isinstance(self.answer, Exception):
            raise self.answer
        path = "/" + url.split("/", 3)[3]
        return self.answer if path == "/tokenize" else self.others.get(path, (403, {"error": {"message": "off"}}))


def llama_like(folder: Path) -> Path:
    """A tokenizer with a Metaspace pre-tokenizer and a BOS of its own, as SentencePiece models have, in ``folder``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    special = ["<unk>", "<s>", "</s>", "<|start|>", "<|end|>", "<|eot|>", *(f"<0x{value:02X}>" for value in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog and says hello world"] * 20, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(LLAMA_TEMPLATE)
    return folder
