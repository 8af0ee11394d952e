"""Real SDKs: each raises its own error for an overflow, waits as long as it is told, and streams without complaint."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agents import base_environment
from conftest import Serve
from e2e_gateway import Gateway
from scripted import BUSY_S, MODEL, ScriptedBackend

pytestmark = [
    pytest.mark.clients,
    # Other people's libraries may warn of what they like.
    pytest.mark.filterwarnings("default"),
]

LONG = "word " * 20_000
WINDOW_TOKENS = 4096


@pytest.fixture(scope="module")
def gateway(scripted: Serve) -> Iterator[Gateway]:
    with scripted(WINDOW_TOKENS, settings={"OVERFLOW__POLICY": "reject"}) as (gateway, _):
        yield gateway


def ask(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def assert_waited(busy: ScriptedBackend, text: str) -> None:
    first_s, second_s = busy.script.arrived_s[text]
    assert BUSY_S - 0.05 <= second_s - first_s < BUSY_S + 3


def test_openai_for_python(gateway: Gateway, busy: ScriptedBackend) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="dummy") as client:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(model=MODEL, messages=ask(LONG), stream=stream)
            assert caught.value.code == "context_length_exceeded"
            with pytest.raises(openai.BadRequestError) as caught:
                client.responses.create(model=MODEL, input=LONG, stream=stream)
            assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
        chunks = list(
            client.chat.completions.create(
                model=MODEL, messages=ask("Hello."), stream=True, stream_options={"include_usage": True}
            )
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices).startswith("Summary")
        assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [20]
        told = list(client.responses.create(model=MODEL, input="Hello.", stream=True))
        assert told[-1].type == "response.completed"
    with openai.OpenAI(base_url=f"{busy.url}/v1", api_key="dummy") as client:
        client.chat.completions.create(model=MODEL, messages=ask("python"))
    assert_waited(busy, "python")


def test_openai_for_python_is_told_of_an_overflow_as_codex_is(gateway: Gateway) -> None:
    openai = pytest.importorskip("openai")
    with (
        openai.OpenAI(
            base_url=f"{gateway.url}/v1", api_key="dummy", default_headers={"originator": "codex_exec"}
        ) as client,
        pytest.raises(openai.APIError, match="exceeds the context window"),
    ):
        list(client.responses.create(model=MODEL, input=LONG, stream=True))


def test_anthropic_for_python(gateway: Gateway, busy: ScriptedBackend) -> None:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=gateway.url, api_key="dummy") as client:
        with pytest.raises(anthropic.BadRequestError) as caught:
            client.messages.create(model=MODEL, max_tokens=50, messages=ask(LONG))
        assert caught.value.body["error"]["message"].startswith("prompt is too long: ")
        assert caught.value.request_id
        with client.messages.stream(model=MODEL, max_tokens=50, messages=ask("Hello.")) as stream:
            assert stream.get_final_text().startswith("Summary")
            assert stream.get_final_message().usage.output_tokens == 20
    with anthropic.Anthropic(base_url=busy.url, api_key="dummy") as client:
        client.messages.create(model=MODEL, max_tokens=50, messages=ask("anthropic"))
    assert_waited(busy, "anthropic")


def test_langchain(gateway: Gateway, busy: ScriptedBackend) -> None:
    langchain = pytest.importorskip("langchain_openai")
    errors = pytest.importorskip("langchain_core.exceptions")
    chat = langchain.ChatOpenAI(base_url=f"{gateway.url}/v1", api_key="dummy", model=MODEL)
    with pytest.raises(errors.ContextOverflowError):
        chat.invoke(LONG)
    with pytest.raises(errors.ContextOverflowError):
        list(chat.stream(LONG))
    assert "".join(chunk.text for chunk in chat.stream("Hello.")).startswith("Summary")
    langchain.ChatOpenAI(base_url=f"{busy.url}/v1", api_key="dummy", model=MODEL).invoke("langchain")
    assert_waited(busy, "langchain")


def test_sdks_of_node(gateway: Gateway, busy: ScriptedBackend, node: Path, tmp_path: Path) -> None:
    """openai, the AI SDK with ``@ai-sdk/openai-compatible``, and anthropic."""
    script = Path(shutil.copy(Path(__file__).with_name("sdks.mjs"), node))  # modules are looked for beside it
    ran = subprocess.run(
        ["node", str(script), gateway.url, busy.url],
        env=base_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    seen = json.loads(ran.stdout.splitlines()[-1])
    overflow = {"bad": True, "status": 400, "code": "context_length_exceeded", "param": "messages"}
    assert seen["openai overflow, stream false"] == seen["openai overflow, stream true"] == overflow
    assert seen["openai stream"].startswith("Summary")
    assert seen["ai overflow"].pop("message").startswith("This model's maximum context length is 4096 tokens.")
    expected = {"api": True, "status": 400, "retryable": False, "code": "context_length_exceeded"}
    assert seen["ai overflow"] == expected
    assert seen["ai stream"].pop("text").startswith("Summary")
    assert seen["ai stream"] == {"errors": [], "finish": "stop", "usage": 20}
    assert seen["anthropic overflow"].pop("message").startswith("prompt is too long: ")
    assert seen["anthropic overflow"] == {"bad": True, "type": "invalid_request_error", "id": True}
    assert seen["anthropic stream"].startswith("Summary")
    assert_waited(busy, "openai")
    assert_waited(busy, "ai")
