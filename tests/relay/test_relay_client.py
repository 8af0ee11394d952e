"""The client's side: its body, its answer, its leaving."""

from __future__ import annotations

import asyncio

import pytest
from relay_wires import Wire, scope

from gateway.exceptions import BodyTooLarge, ClientGone
from gateway.relay.client import read_body


def part(body: bytes, more: bool = False) -> dict[str, object]:
    return {"type": "http.request", "body": body, "more_body": more}


async def test_a_body_in_parts_is_put_together() -> None:
    wire = Wire(part(b"ab", True), part(b"", True), part(b"cd"))
    assert await read_body(scope(), wire.receive, 4) == b"abcd"


async def test_a_client_that_leaves_before_the_end_of_its_body_is_gone() -> None:
    wire = Wire(part(b"ab", True), {"type": "http.disconnect"})
    with pytest.raises(ClientGone):
        await read_body(scope(), wire.receive, 100)


async def test_a_body_beyond_the_limit_is_refused_as_soon_as_that_is_known() -> None:
    wire = Wire(part(b"abc", True), part(b"def", True))
    with pytest.raises(BodyTooLarge, match="larger than 5 bytes"):
        await read_body(scope(), wire.receive, 5)


async def test_a_declared_length_beyond_the_limit_is_refused_before_a_byte_is_read() -> None:
    with pytest.raises(BodyTooLarge):
        await asyncio.wait_for(read_body(scope(headers=[(b"content-length", b"6")]), Wire().receive, 5), 1)


async def test_a_hang_up_cancels_the_work_and_is_told_as_client_gone() -> None:
    wire = Wire()
    loop = asyncio.get_running_loop()
    loop.call_later(0.01, wire.hang_up)
    began_s = loop.time()
    with pytest.raises(ClientGone):
        async with wire.client():
            await asyncio.sleep(10)
    assert loop.time() - began_s < 0.1
    await asyncio.sleep(0)  # the cancellation was used up: the task can still wait


async def test_cancelling_the_task_is_no_hang_up() -> None:
    async def work() -> None:
        async with Wire().client():
            await asyncio.sleep(10)

    task = asyncio.create_task(work())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def test_a_shutdown_at_the_moment_of_a_hang_up_stays_a_shutdown() -> None:
    wire = Wire()

    async def work() -> None:
        async with wire.client():
            await asyncio.sleep(10)

    task = asyncio.create_task(work())
    await asyncio.sleep(0.01)
    wire.hang_up()
    task.cancel()
    with pytest.raises((asyncio.CancelledError, ClientGone)) as caught:
        await task
    assert caught.type is asyncio.CancelledError


async def test_the_disconnect_after_a_complete_answer_is_no_hang_up() -> None:
    wire = Wire()
    async with wire.client() as client:
        await client.answer(200, [("x-a", "1")], b"hello")
        wire.hang_up()
        await asyncio.sleep(0.02)
    assert wire.status == 200
    assert wire.body == b"hello"
    assert wire.complete


async def test_the_watcher_does_not_outlive_the_exchange() -> None:
    before = asyncio.all_tasks()
    async with Wire().client() as client:
        await client.answer(204, [], b"")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


async def test_a_dropped_client_is_gone() -> None:
    with pytest.raises(ClientGone):
        async with Wire().client() as client:
            client.drop()
            await asyncio.sleep(10)
