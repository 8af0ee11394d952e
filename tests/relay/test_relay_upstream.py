"""Exchanges with a backend that misbehaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest
from relay_wires import Answer, Server, sends, serving

from gateway.config import RelaySettings
from gateway.exceptions import BackendFailed, BackendTimeout
from gateway.relay.upstream import Upstream

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
IDLE_S = 0.2


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    async with Upstream(RelaySettings(connect_timeout_s=0.5)) as opened:
        yield opened


async def ask(upstream: Upstream, url: str, timeout_s: float = 2) -> bytes:
    response = await upstream.open("POST", url, {"x-a": "1"}, b"{}", timeout_s)
    try:
        return await response.read(1000, IDLE_S)
    finally:
        response.close()


async def test_a_request_arrives_with_its_headers_body_and_path_as_they_are(upstream: Upstream) -> None:
    async with serving(sends(OK)) as server:
        assert await ask(upstream, server.url + "/v1/a%2Fb%3F?q=%zz&a=b+c") == b"ok"
    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/a%2Fb%3F?q=%zz&a=b+c HTTP/1.1\r\n")
    assert b"\r\nx-a: 1" in head
    assert body == b"{}"


@pytest.mark.parametrize(
    "answer",
    [b"", b"garbage\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n"],
    ids=["nothing", "garbage", "no-status", "no-length"],
)
async def test_an_answer_that_is_not_http_is_a_failure_of_the_backend(upstream: Upstream, answer: bytes) -> None:
    async with serving(sends(answer)) as server:
        with pytest.raises(BackendFailed) as caught:
            await ask(upstream, server.url)
        assert server.url.removeprefix("http://") not in caught.value.message


async def test_a_backend_that_is_not_there_is_a_failure(upstream: Upstream) -> None:
    async with serving(sends(OK)) as server:
        url = server.url
    with pytest.raises(BackendFailed, match="Connection refused") as caught:
        await ask(upstream, url)
    assert "127.0.0.1" not in caught.value.message


async def test_a_backend_that_never_begins_is_timed_out_and_its_connection_closed(upstream: Upstream) -> None:
    async with serving(sends(None)) as server:
        with pytest.raises(BackendTimeout):
            await ask(upstream, server.url, timeout_s=0.1)
        await asyncio.wait_for(server.closed.wait(), 0.1)


async def test_a_body_that_stalls_is_timed_out_and_its_connection_closed(upstream: Upstream) -> None:
    async with serving(sends(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n", b"half", None)) as server:
        began_s = time.monotonic()
        with pytest.raises(BackendTimeout):
            await ask(upstream, server.url)
        assert time.monotonic() - began_s < IDLE_S + 0.3
        await asyncio.wait_for(server.closed.wait(), 0.1)


async def test_a_body_that_breaks_off_is_a_failure(upstream: Upstream) -> None:
    async with serving(sends(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")) as server:
        with pytest.raises(BackendFailed, match="broke off"):
            await ask(upstream, server.url)


async def test_a_body_beyond_the_limit_is_a_failure(upstream: Upstream) -> None:
    async with serving(sends(b"HTTP/1.1 200 OK\r\ncontent-length: 2000\r\n\r\n" + b"x" * 2000)) as server:
        with pytest.raises(BackendFailed, match="larger than 1000 bytes"):
            await ask(upstream, server.url)


async def test_closing_an_answer_half_read_closes_the_connection(upstream: Upstream) -> None:
    async with serving(sends(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", None)) as server:
        response = await upstream.open("POST", server.url, {}, b"{}", 2)
        began_s = time.monotonic()
        response.close()
        await asyncio.wait_for(server.closed.wait(), 0.1)
        assert time.monotonic() - began_s < 0.1


def serves_then_closes(requests: int) -> Callable[[Server], Answer]:
    """Answer so many requests a connection, and close it when the next one has come, as a proxy in front does."""

    def make(server: Server) -> Answer:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for _ in range(requests):
                await server.take(reader)
                writer.write(OK)
            await server.take(reader)

        return answer

    return make


async def test_a_kept_connection_closed_under_a_request_is_no_failure(upstream: Upstream) -> None:
    async with serving(serves_then_closes(1)) as server:
        for _ in range(5):
            assert await ask(upstream, server.url) == b"ok"
        assert len(server.requests) > 5  # some were written into a connection that closed


async def test_several_kept_connections_closed_at_once_are_no_failure(upstream: Upstream) -> None:
    async with serving(serves_then_closes(1)) as server:
        for _ in range(3):
            answers = await asyncio.gather(*(ask(upstream, server.url) for _ in range(20)))
            assert answers == [b"ok"] * 20


async def test_a_new_connection_closed_without_an_answer_is_not_tried_again(upstream: Upstream) -> None:
    async with serving(sends()) as server:
        with pytest.raises(BackendFailed):
            await ask(upstream, server.url)
        assert len(server.requests) == 1


async def test_connections_are_kept_and_used_again(upstream: Upstream) -> None:
    async with serving(serves_then_closes(100)) as server:
        for _ in range(10):
            assert await ask(upstream, server.url) == b"ok"
        assert server.connections == 1
