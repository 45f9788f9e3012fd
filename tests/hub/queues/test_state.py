"""Producers that wait at a queue which is deleted."""

from __future__ import annotations

import asyncio

import pytest

from atoll.clock import VirtualClock
from atoll.hub.queues.backend import Amount
from atoll.hub.queues.quota import QueueRoom
from atoll.hub.queues.state import QueueState
from atoll.hub.quotas.ledger import Ledger
from atoll.wire.messages import QueueOptions


def test_a_wait_ends_where_it_began() -> None:
    room = QueueRoom(Ledger(clock=VirtualClock()))
    state = QueueState("job/q", QueueOptions(max_items=1))
    room.add(state)
    own = state.room
    assert own is not None
    assert state.reserve(Amount(1, 1))

    async def wait() -> None:
        waiting = asyncio.ensure_future(state.wait(Amount(1, 1), wait_s=60.0))
        await asyncio.sleep(0)
        assert own.waiting == 1
        room.remove(state)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert own.waiting == 0

    asyncio.run(wait())
