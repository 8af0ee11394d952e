"""Fixtures every room may use."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from gateway.simulator.model import default_folder, ensure_model

# Machines are noisy: no test depends on how fast an example is made or run.
settings.register_profile("kvgate", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvgate")


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """Qwen3's real tokenizer and chat template, made once from packages."""
    return ensure_model(default_folder())
