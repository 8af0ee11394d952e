"""The settings: where they come from, which wins, and what a mistake is told."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gateway.config import Settings
from gateway.configuring import ConfigError, known_keys, load


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings of the machine the tests run on."""
    for name in list(os.environ):
        if name.upper().startswith("KVGATE_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def written(text: str) -> Path:
    path = Path("settings.yaml")
    path.write_text(text, encoding="utf-8")
    return path


def refused(file: str | None = None, **flags: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(written(file) if file is not None else None, flags)
    return str(caught.value)


def test_without_any_source_the_defaults_stand() -> None:
    assert load() == Settings()


def test_flags_win_over_the_environment_and_that_over_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    file = written("port: 1\nlog_level: debug\nplacing: {queue_timeout_s: 1, headroom_ratio: 0.5}\n")
    assert load(file).port == 1
    monkeypatch.setenv("KVGATE_PORT", "2")
    monkeypatch.setenv("KVGATE_PLACING__QUEUE_TIMEOUT_S", "2")
    settings = load(file, {"port": 3})
    assert settings.port == 3
    assert settings.placing.queue_timeout_s == 2
    assert settings.placing.headroom_ratio == 0.5
    assert settings.log_level == "debug"


def test_a_file_in_the_current_folder_is_taken_and_a_named_one_must_exist() -> None:
    Path("kvgate.yaml").write_text("port: 9\n", encoding="utf-8")
    assert load().port == 9
    with pytest.raises(ConfigError, match=r"cannot read missing\.yaml"):
        load(Path("missing.yaml"))


@pytest.mark.parametrize("text", ["- a\n", "port: [\n", "just text\n", "\x00"])
def test_a_file_that_is_no_mapping_is_refused_by_name(text: str) -> None:
    assert "settings.yaml" in refused(text)


def test_an_empty_file_sets_nothing() -> None:
    assert load(written("# nothing\n")) == Settings()


@pytest.mark.parametrize(
    ("file", "wrong", "right"),
    [
        ("prot: 1", "prot", "port"),
        ("placing: {queue_tmeout_s: 1}", "placing.queue_tmeout_s", "queue_timeout_s"),
        ("backends: [{url: 'http://a', api_kye: x}]", "backends.0.api_kye", "api_key"),
        ("models: {m: {tokeniser: x}}", "models.m.tokeniser", "tokenizer"),
        ("relay: {retires: 1}", "relay.retires", "retries"),
    ],
)
def test_an_unknown_key_names_the_nearest_right_one(file: str, wrong: str, right: str) -> None:
    assert refused(file) == f"unknown setting {wrong}; did you mean {right}?"


@pytest.mark.parametrize(
    ("variable", "right"),
    [
        ("KVGATE_PROT", "KVGATE_PORT"),
        ("KVGATE_PLACNG__QUEUE_TIMEOUT_S", "KVGATE_PLACING__QUEUE_TIMEOUT_S"),
        ("KVGATE_PLACING__QUEUE_TMEOUT_S", "queue_timeout_s"),
        ("KVGATE_PLACING_QUEUE_TIMEOUT_S", "KVGATE_PLACING__QUEUE_TIMEOUT_S"),
        ("kvgate_relay__retires", "retries"),
    ],
)
def test_an_unknown_variable_names_the_nearest_right_one(
    monkeypatch: pytest.MonkeyPatch, variable: str, right: str
) -> None:
    monkeypatch.setenv(variable, "1")
    message = refused()
    assert message.startswith("unknown ")
    assert message.endswith(f"did you mean {right}?")


def test_a_hint_names_a_key_of_the_same_section() -> None:
    message = refused("relay: {queue_timeout: 1}")  # placing.queue_timeout_s would be of no use here
    assert "queue_timeout_s" not in message


def test_all_mistakes_are_told_at_once_each_with_its_key() -> None:
    lines = refused("port: x\nrelay: {retries: -1}\nfleet: {timeout_s: 0}\n").splitlines()
    assert [line.split(":")[0] for line in sorted(lines)] == ["fleet.timeout_s", "port", "relay.retries"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "gpu-box"])
def test_a_public_address_without_keys_is_refused(host: str) -> None:
    assert "api_keys" in refused(host=host)
    assert load(None, {"host": host, "api_keys": ["k"]}).host == host
    assert load(None, {"host": host, "allow_public": True}).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_an_address_of_this_machine_alone_needs_no_key(host: str) -> None:
    assert load(None, {"host": host}).host == host


def test_an_empty_key_opens_nothing() -> None:
    assert "api_keys" in refused(api_keys=[""])
    assert "api_keys" in refused(host="0.0.0.0", api_keys=[" "])


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://a:8000/v1", "http://a:8000"),
        ("http://a:8000/v1/", "http://a:8000"),
        ("a:8000", "http://a:8000"),
        (" https://a/prefix/ ", "https://a/prefix"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_a_base_url_is_taken_as_people_write_it(given: str, url: str) -> None:
    assert load(None, {"backends": [given]}).backends[0].url == url


@pytest.mark.parametrize(
    "url", ["", "ftp://a", "http://", "http://a?x=1", "http://a#x", "http://a:99999", "http://a:b", "http://[::1"]
)
def test_a_bad_url_is_refused_with_its_place(url: str) -> None:
    assert refused(backends=[{"url": url}]).startswith("backends.0.url: ")


def test_a_url_listed_twice_is_one_backend_and_a_name_used_twice_a_mistake() -> None:
    (backend,) = load(None, {"backends": ["http://a:1", "http://a:1/v1"]}).backends
    assert backend.spellings == ("http://a:1", "http://a:1")
    message = refused(backends=[{"url": "http://a:1", "name": "x"}, {"url": "http://a:2", "name": "x"}])
    assert message == "backends: two backends are named x; give each its own name"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("http://gpu:8000", "http://gpu:8000/"),
        ("http://gpu:8000", "gpu:8000/v1/"),
        ("http://gpu:8000", "http://GPU:8000"),
        ("http://gpu", "http://gpu:80"),
        ("https://gpu", "https://gpu:443/v1"),
        ("http://localhost:8000", "http://127.0.0.1:8000"),
        ("http://gpu.example.", "http://gpu.example"),
    ],
)
def test_one_place_in_two_spellings_is_one_backend_and_with_other_settings_a_mistake(one: str, other: str) -> None:
    (backend,) = load(None, {"backends": [one, other, one]}).backends
    assert len(backend.spellings) == 3
    message = refused(backends=[one, {"url": other, "weight": 2.0}])
    assert "is listed twice, with different settings; keep one of them" in message


@pytest.mark.parametrize("weight", [0, -1, 1e-320, float("inf"), float("nan")])
def test_a_weight_that_no_price_could_be_divided_by_is_refused(weight: float) -> None:
    assert "weight" in refused(backends=[{"url": "http://gpu:8000", "weight": weight}])


@pytest.mark.parametrize("other", ["https://gpu:8000", "http://gpu:8001", "http://gpu:8000/two", "http://gpu2:8000"])
def test_places_that_differ_are_two(other: str) -> None:
    assert len(load(None, {"backends": ["http://gpu:8000", {"url": other, "name": "b"}]}).backends) == 2


@pytest.mark.parametrize(
    "text", ["http://a:1 http://b:2", "http://a:1,http://b:2", '["http://a:1", {"url": "http://b:2"}]']
)
def test_a_variable_holds_several_backends(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("KVGATE_BACKENDS", text)
    assert [backend.url for backend in load().backends] == ["http://a:1", "http://b:2"]


def test_a_variable_that_is_half_a_list_is_a_mistake_and_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGATE_BACKENDS", '["http://a:1"')
    assert "backends" in refused()


@pytest.mark.parametrize(
    ("variable", "text"), [("KVGATE_PLACING", "{queue"), ("KVGATE_MODELS", "x"), ("KVGATE_RELAY", "5")]
)
def test_a_section_given_as_something_else_is_a_mistake_and_no_crash(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str
) -> None:
    monkeypatch.setenv(variable, text)
    assert variable.removeprefix("KVGATE_").lower() in refused()


@pytest.mark.parametrize(
    "file", ["1: 2", "null: 1", "placing: 5", "placing: [1]", "backends: 5", "models: {1: {}}", "port: null"]
)
def test_a_file_of_the_wrong_shape_is_a_mistake_and_no_crash(file: str) -> None:
    assert refused(file)


def test_keys_are_not_shown_when_settings_are_printed() -> None:
    settings = load(None, {"api_keys": ["top-secret"], "backends": [{"url": "http://a", "api_key": "top-secret"}]})
    assert "top-secret" not in repr(settings) + settings.model_dump_json()


def test_every_key_is_known_with_a_description() -> None:
    keys = known_keys()
    assert {"port", "placing.queue_timeout_s", "backends[].url", "models.NAME.tokenizer"} <= keys.keys()
    assert [key for key, text in keys.items() if not text] == []
