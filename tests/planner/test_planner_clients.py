"""The settings printed for agents carry the true window, parse in the client's own format, and come from any source."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import yaml

from gateway.cli import main
from gateway.planner.client_settings import CLIENTS, Endpoint, output_limit, settings_for

HERE = Endpoint("http://127.0.0.1:8080", "qwen", 32768, 8192, "key")


@pytest.mark.parametrize("client", sorted(CLIENTS))
def test_every_client_is_told_the_model_and_the_address(client: str) -> None:
    text = "\n".join(setting.text for setting in settings_for(client, HERE))
    assert "qwen" in text
    assert "127.0.0.1:8080" in text or client in ("aider", "qwen-code")


@pytest.mark.parametrize("client", sorted(set(CLIENTS) - {"aider", "copilot"}))
def test_every_client_is_told_the_window(client: str) -> None:
    text = "\n".join("\n".join((setting.text, *setting.notes)) for setting in settings_for(client, HERE))
    assert "32768" in text or "32,768" in text


@pytest.mark.parametrize("client", ["aider", "copilot"])
def test_clients_that_want_the_input_part_get_window_less_output(client: str) -> None:
    assert str(32768 - 8192) in settings_for(client, HERE)[0].text


@pytest.mark.parametrize("client", ["opencode", "crush", "qwen-code", "zed", "copilot", "aider"])
def test_json_settings_parse(client: str) -> None:
    assert json.loads(settings_for(client, HERE)[0].text)


@pytest.mark.parametrize("client", ["continue", "librechat"])
def test_yaml_settings_parse(client: str) -> None:
    assert yaml.safe_load(settings_for(client, HERE)[0].text)


def test_codex_gets_toml_with_the_responses_wire() -> None:
    parsed = tomllib.loads(settings_for("codex", HERE)[0].text)
    assert parsed["model_context_window"] == 32768
    assert parsed["model_providers"]["kvgate"]["wire_api"] == "responses"


def test_claude_code_is_warned_of_a_window_too_small_for_it() -> None:
    small = Endpoint("http://h:1", "m", 16384, 4096)
    assert any("too small" in note for note in settings_for("claude-code", small)[0].notes)
    assert "/v1" not in settings_for("claude-code", HERE)[0].text


@pytest.mark.parametrize(
    ("window", "wanted", "limit"),
    [(32768, None, 8192), (1 << 20, None, 32000), (2048, None, 1024), (512, None, 511), (4096, 99999, 4095)],
)
def test_the_output_limit_leaves_room_for_the_prompt(window: int, wanted: int | None, limit: int) -> None:
    assert output_limit(window, wanted) == limit


def test_a_plan_is_a_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "Qwen/Qwen3-8B", "--gpu", "4090", "--context", "16384", "--offline", "--json"]) == 0
    saved = tmp_path / "plan.json"
    saved.write_text(capsys.readouterr().out)
    assert main(["client-config", "opencode", "--plan", str(saved), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["model"], printed["window"]) == ("Qwen/Qwen3-8B", 16384)


def test_missing_inputs_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["client-config", "cline"]) == 2
    assert "--model and --window" in capsys.readouterr().err
    assert main(["client-config", "cline", "--model", "m", "--window", "8192"]) == 0
    assert "Context Window Size: 8192" in capsys.readouterr().out
