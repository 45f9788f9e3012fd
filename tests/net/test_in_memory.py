from __future__ import annotations

import asyncio

import pytest

from atoll.net.in_memory import pair
from atoll.net.transport import ConnectionLost
from tests.net.scripted import run


def test_messages_sent_before_a_close_arrive_in_order() -> None:
    async def scenario() -> None:
        here, there = pair()
        for index in range(3):
            await here.send(bytes([index]))
        await here.close(1012, "restart")
        assert [await there.receive() for _ in range(3)] == [b"\x00", b"\x01", b"\x02"]
        with pytest.raises(ConnectionLost) as caught:
            await there.receive()
        assert (caught.value.code, caught.value.reason) == (1012, "restart")
        with pytest.raises(ConnectionLost):
            await there.send(b"late")

    run(scenario())


def test_send_waits_when_the_other_end_does_not_read() -> None:
    async def scenario() -> None:
        here, there = pair(capacity=2)
        await here.send(b"1")
        await here.send(b"2")
        third = asyncio.create_task(here.send(b"3"))
        await asyncio.sleep(0)
        assert not third.done()
        assert await there.receive() == b"1"
        await third
        assert await there.receive() == b"2"

    run(scenario())


def test_a_cut_loses_what_was_under_way_and_wakes_both_ends() -> None:
    async def scenario() -> None:
        here, there = pair(capacity=1)
        reading = asyncio.create_task(here.receive())
        await here.send(b"lost")
        sending = asyncio.create_task(here.send(b"never"))
        await asyncio.sleep(0)
        there.cut()
        for task in (reading, sending):
            with pytest.raises(ConnectionLost):
                await task
        with pytest.raises(ConnectionLost) as caught:
            await there.receive()
        assert caught.value.code == 1006

    run(scenario())
