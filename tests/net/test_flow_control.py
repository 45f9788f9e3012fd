from __future__ import annotations

import asyncio

import pytest

from atoll.errors import HubError
from atoll.net.flow_control import CreditWindow
from tests.net.scripted import run


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_wait_cancelled_while_served_takes_no_credit() -> None:
    async def scenario() -> None:
        credits_ = CreditWindow()
        credits_.open(10, generation=1)
        await credits_.acquire("r", 10)
        waiting = asyncio.create_task(credits_.acquire("r", 10))
        await settle()
        credits_.release("r", 10, generation=1)  # serves the waiter ...
        waiting.cancel()  # ... who is cancelled before it runs
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert credits_.owed_bytes("r") == 0
        assert await credits_.acquire("r", 10) == 1

    run(scenario())


def test_a_cancelled_wait_lets_the_next_one_through() -> None:
    async def scenario() -> None:
        credits_ = CreditWindow()
        credits_.open(10, generation=1)
        await credits_.acquire("r", 6)
        large = asyncio.create_task(credits_.acquire("r", 8))
        small = asyncio.create_task(credits_.acquire("r", 4))
        await settle()
        assert not small.done()  # in order: behind the large one
        large.cancel()
        assert await small == 1

    run(scenario())


def test_nobody_sends_while_the_books_are_shut() -> None:
    async def scenario() -> None:
        credits_ = CreditWindow()
        waiting = asyncio.create_task(credits_.acquire("r", 4))
        await settle()
        assert not waiting.done()
        credits_.open(10, generation=7)
        assert await waiting == 7
        credits_.shut()
        credits_.release("r", 4, generation=7)  # credit of a connection that is gone
        waiting = asyncio.create_task(credits_.acquire("r", 4))
        await settle()
        assert not waiting.done()
        credits_.fail(HubError("over"))
        with pytest.raises(HubError, match="over"):
            await waiting
        with pytest.raises(HubError, match="over"):
            await credits_.acquire("r", 4)

    run(scenario())
