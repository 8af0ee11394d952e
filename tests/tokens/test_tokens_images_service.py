"""Requests with images get exact local counts, which are audited apart from those of text."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_tokens_media_headers import png
from tokens_helpers import FakeBackend, chat_ask

from gateway.api.parsers import parser_of
from gateway.config import CountingSettings
from gateway.tokens import service
from gateway.tokens.local import LocalCounter, TemplateOptions, load
from gateway.tokens.service import Counter, ServedModel
from gateway.types import ChatPrompt, CountKind

TEMPLATE = """{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}
{%- for part in message['content'] %}
{%- if part['type'] == 'image' %}<|image_pad|>{% else %}{{ part['text'] }}{% endif %}
{%- endfor %}{% endif %}{% endfor %}"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LocalCounter:
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder: Path = tmp_path_factory.mktemp("qwen-like")
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "look": 1, "here": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|image_pad|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen2VLForConditionalGeneration"]}))
    return load(str(folder), TemplateOptions(), hub=False, cache_bytes=1 << 20)


@pytest.fixture
def counter(loaded: LocalCounter, monkeypatch: pytest.MonkeyPatch) -> Counter:
    monkeypatch.setattr(service, "load", lambda *args, **kwargs: loaded)
    return Counter(CountingSettings(), {}, FakeBackend((200, {"count": 77})).post)


MODEL = ServedModel("m", "root", ("http://a:1",))


def ask(url: str | None = None, **fields: Any) -> Any:
    url = url or "data:image/png;base64," + base64.b64encode(png(280, 140)).decode()
    image = {"type": "image_url", "image_url": {"url": url}}
    return chat_ask([{"role": "user", "content": [{"type": "text", "text": "look"}, image]}], **fields)


async def test_an_image_is_counted_exactly_and_audited(counter: Counter) -> None:
    count = await counter.count(ask(), MODEL)
    assert (count.tokens, count.kind, count.source) == (1 + 10 * 5, CountKind.EXACT, "local")
    assert counter.observe("m", count, 51) == 0
    assert (await counter.count(ask(mm_processor_kwargs={"max_pixels": 7840}), MODEL)).tokens == 1 + 4 * 2


async def test_wrong_counts_of_images_leave_text_trusted(counter: Counter) -> None:
    for _ in range(2):
        counter.observe("m", await counter.count(ask(), MODEL), 60)
    assert (await counter.count(ask(), MODEL)).source == "tokenize"
    text = await counter.count(chat_ask([{"role": "user", "content": "look here"}]), MODEL)
    assert (text.tokens, text.source) == (2, "local")


@pytest.mark.parametrize(
    ("url", "source"),
    [
        ("https://example.org/a.png", "tokenize"),
        ("data:image/png;base64,@", "estimate"),
        ("data:image/png;base64,QUJD", "tokenize"),
    ],
)
async def test_what_is_not_known_here_is_counted_elsewhere(counter: Counter, url: str, source: str) -> None:
    assert (await counter.count(ask(url), replace(MODEL))).source == source


@pytest.mark.parametrize(
    ("path", "conversation"),
    [("/v1/chat/completions", "messages"), ("/v1/responses", "input"), ("/v1/embeddings", "messages")],
)
def test_arguments_of_processors_and_loaders_are_read_in_every_dialect_that_has_them(
    path: str, conversation: str
) -> None:
    given = {"mm_processor_kwargs": {"max_pixels": 7840}, "media_io_kwargs": {"video": {"fps": 1}}}
    body = {"model": "m", conversation: [{"role": "user", "content": "hi"}], **given}
    prompt = parser_of("POST", path)(json.dumps(body).encode(), "application/json", path).prompt
    assert isinstance(prompt, ChatPrompt)
    assert (prompt.mm_processor_kwargs, prompt.media_io_kwargs) == tuple(given.values())
