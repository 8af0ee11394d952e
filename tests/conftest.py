"""Fixtures every room may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.simulator.model import default_folder, ensure_model


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """Qwen3's real tokenizer and chat template, made once from packages."""
    return ensure_model(default_folder())
