"""A vLLM server's three control pages, changeable at will, on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from aiohttp import web

from gateway.config import Settings
from gateway.fleet.fleet import Fleet


class Server:
    """What it answers can be changed while it runs; ``stop`` and ``start`` keep the port."""

    def __init__(self) -> None:
        self.cards: list[dict[str, Any]] = [card("qwen3", 32768)]
        self.version: Any = {"version": "0.32.0"}
        self.blocks = 1001
        self.block_size = 16
        self.used_blocks = 0
        self.running = 0
        self.tokens = 1000
        self.started_s = 1.7e9
        self.models_body: bytes | None = None
        self.metrics_body: bytes | None = None
        self.metrics_status = 200
        self.metrics_type = "text/plain"
        self.chooses = True  # of the metrics only what is asked for, as vLLM does below its route
        self.health_status = 200
        self.says: dict[str, Any] = {}  # what further pages answer, as JSON
        self.models_status = 200
        self.delay_s = 0.0
        self.hangs: tuple[str, ...] = ()  # pages that are never answered
        self.key: str | None = None
        self.port = 0
        self.asked: list[str] = []
        self.at_once = self.most_at_once = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def metrics(self) -> str:
        usage = self.used_blocks / (self.blocks - 1)
        return (
            f'vllm:num_requests_running{{engine="0"}} {self.running}.0\n'
            'vllm:num_requests_waiting{engine="0"} 0.0\n'
            f'vllm:kv_cache_usage_perc{{engine="0"}} {usage!r}\n'
            f'vllm:prompt_tokens_total{{engine="0"}} {self.tokens}.0\n'
            f'vllm:cache_config_info{{block_size="{self.block_size}",engine="0",num_gpu_blocks="{self.blocks}",'
            f'kv_cache_size_tokens="{self.blocks * self.block_size}",num_gpu_blocks_override="{self.blocks}"}} 1.0\n'
            f"process_start_time_seconds {self.started_s!r}\n"
        )

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path)
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        try:
            if self.delay_s or request.path in self.hangs:
                await asyncio.sleep(self.delay_s or 3600)
            return self._page(request)
        finally:
            self.at_once -= 1

    def _page(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/models":
            if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
                return web.json_response({"error": "Unauthorized"}, status=401)
            if self.models_body is not None:
                return web.Response(body=self.models_body)
            return web.json_response({"object": "list", "data": self.cards}, status=self.models_status)
        if request.path == "/version":
            return web.json_response(self.version)
        if request.path == "/health":
            return web.Response(status=self.health_status)
        if request.path in self.says:
            return web.json_response(self.says[request.path])
        if request.path == "/metrics" or (request.path == "/metrics/" and self.chooses):
            body = self.metrics().encode() if self.metrics_body is None else self.metrics_body
            return web.Response(body=body, status=self.metrics_status, content_type=self.metrics_type)
        raise web.HTTPNotFound


def card(name: str, window: int | None, parent: str | None = None) -> dict[str, Any]:
    """A model card as vLLM writes it."""
    return {"id": name, "object": "model", "root": f"/models/{name}", "parent": parent, "max_model_len": window}


@contextlib.asynccontextmanager
async def server() -> AsyncIterator[Server]:
    """A running server."""
    fake = Server()
    await fake.start()
    try:
        yield fake
    finally:
        await fake.stop()


@contextlib.asynccontextmanager
async def watching(
    *backends: Any, on_change: Callable[[], None] = lambda: None, **fleet_settings: Any
) -> AsyncIterator[Fleet]:
    """A fleet watching ``backends`` in quick succession, after its first look."""
    quick = {"scrape_interval_s": 0.02, "scrape_slowest_s": 0.02, "timeout_s": 1.0} | fleet_settings
    fleet = Fleet(Settings(backends=backends, fleet=quick), on_change)
    await fleet.start()
    try:
        await fleet.wait_until_known(5.0)
        yield fleet
    finally:
        await fleet.stop()


async def eventually(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Wait until ``condition`` holds; fail when the time is up."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
