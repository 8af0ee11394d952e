"""Draining a backend by an admin call."""

from __future__ import annotations

import httpx2

from gateway.app import App, create_app
from gateway.config import Settings

NAME = "127.0.0.1:9"


def client(app: App) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://gw")


async def post(app: App, what: str, key: str | None = "admin", name: str = NAME) -> httpx2.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with client(app) as http:
        return await http.post(f"/kvgate/backends/{name}/{what}", headers=headers)


async def test_an_admin_key_drains_a_backend_and_takes_it_back() -> None:
    app = create_app(Settings(backends=[f"http://{NAME}"], api_keys=["user"], admin_keys=["admin"]))
    answer = await post(app, "drain")
    assert answer.status_code == 200
    assert answer.json() == {"backend": NAME, "draining": True, "in_flight": 0}
    assert app.fleet.records()[0].draining
    assert (await post(app, "undrain")).json()["draining"] is False
    assert not app.fleet.records()[0].draining


async def test_nobody_else_may() -> None:
    app = create_app(Settings(backends=[f"http://{NAME}"], api_keys=["user"], admin_keys=["admin"]))
    assert (await post(app, "drain", key="user")).status_code == 401
    assert (await post(app, "drain", key=None)).status_code == 401
    assert not app.fleet.records()[0].draining


async def test_without_admin_keys_there_is_no_such_call() -> None:
    app = create_app(Settings(backends=[f"http://{NAME}"]))
    answer = await post(app, "drain", key="")
    assert answer.status_code == 404
    assert "admin_keys" in answer.json()["error"]["message"]
    assert not app.fleet.records()[0].draining


async def test_an_unknown_backend_is_named_with_those_there_are() -> None:
    app = create_app(Settings(backends=[f"http://{NAME}"], admin_keys=["admin"]))
    answer = await post(app, "drain", name="nobody")
    assert answer.status_code == 404
    assert NAME in answer.json()["error"]["message"]
