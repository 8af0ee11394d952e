"""The routes the gateway answers itself, and who may ask for them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx2
import pytest

from gateway.app import create_app
from gateway.config import Settings

KEY = {"authorization": "Bearer k"}


@pytest.fixture
async def http() -> AsyncIterator[httpx2.AsyncClient]:
    """A client of a gateway whose one backend is not there: nothing here needs it."""
    settings = Settings(backends=["http://127.0.0.1:9"], api_keys=["k"])
    transport = httpx2.ASGITransport(create_app(settings))
    async with httpx2.AsyncClient(transport=transport, base_url="http://gw") as client:
        yield client


async def test_the_root_tells_the_base_url_to_paste(http: httpx2.AsyncClient) -> None:
    answer = await http.get("/")
    assert answer.json()["openai_base_url"] == "http://gw/v1"


@pytest.mark.parametrize("path", ["/", "/health", "/metrics"])
async def test_probes_need_no_key(http: httpx2.AsyncClient, path: str) -> None:
    assert (await http.get(path)).status_code == 200


@pytest.mark.parametrize("path", ["/", "/health", "/ready"])
async def test_probes_may_ask_with_head(http: httpx2.AsyncClient, path: str) -> None:
    answer = await http.head(path)
    assert answer.status_code == (503 if path == "/ready" else 200)
    assert answer.content == b""


async def test_without_a_backend_the_gateway_is_healthy_and_not_ready(http: httpx2.AsyncClient) -> None:
    assert (await http.get("/health")).status_code == 200
    assert (await http.get("/ready")).status_code == 503


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("GET", "/models"),
        ("GET", "//v1//models/"),
        ("GET", "/v1/models/m"),
        ("GET", "/model/info"),
        ("GET", "/v1/model/info"),
        ("GET", "/kvgate/status"),
        ("GET", "/v1/responses/x"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/chat/completions"),
        ("POST", "/v1/v1/chat/completions/"),
        ("POST", "/v1/messages"),
        ("POST", "/v1/audio/transcriptions"),
        ("POST", "/tokenize"),
        ("POST", "/score"),
    ],
)
async def test_everything_else_needs_a_key(http: httpx2.AsyncClient, method: str, path: str) -> None:
    refused = await http.request(method, f"http://gw{path}")
    assert refused.status_code == 401
    assert refused.headers["x-request-id"]
    assert "key" in refused.json()["error"]["message"].lower()
    wrong = await http.request(method, f"http://gw{path}", headers={"authorization": "Bearer x"})
    assert wrong.status_code == 401
    let_in = await http.request(method, f"http://gw{path}", headers=KEY)
    assert let_in.status_code != 401


@pytest.mark.parametrize("path", ["/v1/models", "//v1//models", "/v1/models/", "/models", "/v1/v1/models"])
async def test_the_models_are_listed_however_the_path_is_written(http: httpx2.AsyncClient, path: str) -> None:
    answer = await http.get(f"http://gw{path}", headers=KEY)
    assert answer.status_code == 200
    assert answer.json()["object"] == "list"


@pytest.mark.parametrize("path", ["/nope", "/simulator/fault", "/v1", "/reset_prefix_cache", "/server_info"])
async def test_an_unknown_path_is_404_in_openais_shape_and_tells_the_base_url(
    http: httpx2.AsyncClient, path: str
) -> None:
    answer = await http.get(path, headers=KEY)
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert "http://gw/v1" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/health", "/kvgate/status"])
async def test_a_wrong_method_is_405_in_openais_shape(http: httpx2.AsyncClient, path: str) -> None:
    answer = await http.post(path, headers=KEY)
    assert answer.status_code == 405
    assert "POST" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/%2e%2e/metrics",
        "/v1/x/%2e%2e/%2e%2e/reset_prefix_cache",
        "/v1/x/..%2f..%2fshutdown",
        "/score/%2e%2e/version",
        "/v1/%2e/models",
        "/v1/..%5c..%5cmetrics",
    ],
)
async def test_a_path_with_dots_reaches_no_backend(http: httpx2.AsyncClient, path: str) -> None:
    answer = await http.post(f"http://gw{path}", headers=KEY)
    assert answer.status_code == 404
    assert "There is no" in answer.json()["error"]["message"]


async def test_a_request_for_a_model_that_nobody_serves_is_404(http: httpx2.AsyncClient) -> None:
    answer = await http.post("/v1/chat/completions", headers=KEY, json={"model": "m", "messages": [{"role": "user"}]})
    assert answer.status_code in {404, 503}
    assert answer.json()["error"]["message"]


async def test_outcomes_are_counted_and_nothing_is_held(http: httpx2.AsyncClient) -> None:
    await http.post("/v1/chat/completions", content=b"{", headers={**KEY, "content-type": "application/json"})
    await http.post("/v1/chat/completions", content=b"{}")
    text = (await http.get("/metrics")).text
    assert 'kvgate_rejections_total{reason="invalid_request"} 1.0' in text
    assert 'kvgate_rejections_total{reason="invalid_api_key"} 1.0' in text
    assert 'kvgate_requests_in_flight{backend="127.0.0.1:9"} 0.0' in text
    assert "kvgate_queue_requests 0.0" in text


@pytest.mark.parametrize("given", ["é", "a\x7f", "", "Ж".encode()])
async def test_a_request_id_that_is_no_plain_text_is_replaced(http: httpx2.AsyncClient, given: str | bytes) -> None:
    raw = given if isinstance(given, bytes) else given.encode("latin-1")
    answer = await http.post(
        "/v1/chat/completions", content=b"{", headers=[(b"x-request-id", raw), (b"x-api-key", b"k")]
    )
    assert answer.headers["x-request-id"].isalnum()
    assert len(answer.headers["x-request-id"]) == 32


async def test_a_request_id_is_kept_and_cut(http: httpx2.AsyncClient) -> None:
    for given in ("my-id", "r" * 500):
        answer = await http.post("/v1/completions", content=b"{", headers={**KEY, "x-request-id": given})
        assert answer.headers["x-request-id"] == given[:128]
