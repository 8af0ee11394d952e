"""Policies that contradict themselves are found when the settings are read."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.config import key_fingerprint
from gateway.configuring import ConfigError, load


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"overflow": {"policy": "trim", "ladder": []}}, "policy is trim, but ladder has no step"),
        ({"overflow": {"routes": {"/v1/messages": "trim"}, "ladder": []}}, "routes./v1/messages is trim"),
        ({"overflow": {"ladder": []}, "models": {"m": {"overflow": "trim"}}}, "models.m.overflow is trim"),
        ({"models": {"m": {"overflow": "larger"}}}, "models.m.larger_model names no model"),
        ({"models": {"m": {"larger_model": "m"}}}, "models.m.larger_model is the model itself"),
        ({"overflow": {"keys": {"sk-secret": "trim"}}}, "sk-s… is not 8 hex digits"),
        ({"overflow": {"keys": {"0123abcd": "trim"}}}, "none of api_keys has the fingerprint 0123abcd"),
        ({"overflow": {"policy": "shorten"}}, "overflow.policy"),
        ({"overflow": {"ladder": ["everything"]}}, "overflow.ladder"),
        ({"overflow": {"summary_url": "not a url"}}, "not an http(s) URL"),
    ],
)
def test_what_contradicts_itself_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(flags=settings)
    assert said in str(error.value)
    assert "secret" not in str(error.value)


def test_a_key_is_named_by_its_fingerprint() -> None:
    settings = load(flags={"api_keys": ["sk-1"], "overflow": {"keys": {key_fingerprint("sk-1"): "reject"}}})
    assert settings.overflow.keys == {key_fingerprint("sk-1"): "reject"}
