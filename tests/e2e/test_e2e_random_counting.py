"""Whatever odd request the server takes, its prompt tokens are known beforehand."""

from __future__ import annotations

import json
from pathlib import Path

import httpx2
import pytest
from e2e_backends import Backends
from e2e_processes import PLAIN
from e2e_random import RandomChats

from gateway.api import chat
from gateway.tokens.errors import CannotCount
from gateway.tokens.local import TemplateOptions, load

REQUESTS = 60


@pytest.mark.parametrize("seed", [1, 2])
def test_random_requests_have_the_prompt_tokens_we_count(backends: Backends, model_folder: Path, seed: int) -> None:
    local = load(str(model_folder), TemplateOptions(), hub=False, cache_bytes=1 << 20)
    chats = RandomChats(seed)
    served = 0
    with httpx2.Client(base_url=backends.large.url, timeout=60, **PLAIN) as client:
        for _ in range(REQUESTS):
            body = {"model": backends.model, "max_tokens": 1, **chats.body()}
            answer = client.post("/v1/chat/completions", json=body)
            ask = chat.parse(json.dumps(body).encode(), "application/json")
            assert ask.prompt is not None
            if answer.status_code == 400:
                continue  # nothing to compare; the count does not matter either
            try:
                (tokens,) = local.count(ask.prompt, {})
            except CannotCount as error:
                pytest.fail(f"not counted: {error.reason}\n{json.dumps(body)}")
            if ask.truncate_prompt_tokens is not None:
                tokens = min(tokens, ask.truncate_prompt_tokens)
            assert tokens == answer.json()["usage"]["prompt_tokens"], json.dumps(body)
            served += 1
    assert served > 0.9 * REQUESTS
