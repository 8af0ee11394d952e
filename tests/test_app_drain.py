"""Draining a backend by an admin call."""

from __future__ import annotations

import asyncio

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


async def ready(app: App) -> tuple[int, str]:
    async with client(app) as http:
        answer = await http.get("/ready")
        return answer.status_code, answer.text.strip()


async def test_a_gateway_is_ready_while_a_backend_takes_new_requests() -> None:
    others = ("127.0.0.1:7", "127.0.0.1:8")
    app = create_app(Settings(backends=[f"http://{name}" for name in (NAME, *others)], admin_keys=["admin"]))
    one, two, three = (backend.availability for backend in app.fleet.watched())
    assert await ready(app) == (503, "not ready: no backend takes new requests: 3 unknown")
    one.set_reachable(True)
    two.set_reachable(True)
    three.set_reachable(False)
    assert await ready(app) == (200, "ready")
    await post(app, "drain")
    assert await ready(app) == (200, "ready")
    await post(app, "drain", name=others[0])
    assert await ready(app) == (503, "not ready: no backend takes new requests: 1 down, 2 draining")
    await post(app, "undrain")
    assert await ready(app) == (200, "ready")
    one.set_asleep(True)
    assert await ready(app) == (503, "not ready: no backend takes new requests: 1 asleep, 1 down, 1 draining")


async def test_a_backend_that_stands_by_for_a_drained_one_makes_nobody_ready() -> None:
    app = create_app(Settings(backends=[f"http://{NAME}", "http://127.0.0.1:8"], admin_keys=["admin"]))
    one, two = (backend.availability for backend in app.fleet.watched())
    for availability in (one, two):
        availability.set_reachable(True)
    two.stand_by(NAME)
    assert (await ready(app))[0] == 200
    await post(app, "drain")
    assert (await ready(app))[0] == 503


async def test_backends_that_rest_for_a_moment_leave_the_gateway_ready() -> None:
    app = create_app(Settings(backends=[f"http://{NAME}"]))
    (availability,) = (backend.availability for backend in app.fleet.watched())
    availability.set_reachable(True)
    now_s = asyncio.get_running_loop().time()
    availability.note_busy(now_s, full=True)
    availability.eject(now_s + 60, "it is slow")
    assert await ready(app) == (200, "ready")


async def test_a_gateway_that_stops_is_not_ready() -> None:
    app = create_app(Settings(backends=[f"http://{NAME}"]))
    app.fleet.watched()[0].availability.set_reachable(True)
    app.stopping = True
    assert await ready(app) == (503, "not ready: stopping")
