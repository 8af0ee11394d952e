"""What ``kvgate simulate`` says before it starts."""

from __future__ import annotations

import pytest

from gateway.cli import main, simulate


def test_kv_events_without_their_packages_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(simulate, "find_spec", lambda name: None)
    assert main(["simulate", "--port", "0", "--kv-events-config", "{}"]) == 2
    assert "pip install 'kvgate[kv-events]'" in capsys.readouterr().err
