"""Events: who waits for one, and what that costs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from atoll.hub.db.last_ids import LastIdCache
from atoll.hub.observability.events import EVERYWHERE, LOOK_S
from atoll.hub.stores import Stores
from tests.hub.durable import with_stores
from tests.patience import PATIENCE_S


def test_thousands_that_wait_cost_one_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one viewer with as many connections as it may have keeps the hub busy with nothing."""
    looks = 0
    is_all = LastIdCache.is_all

    def counted(cache: LastIdCache, job: str, after: int) -> bool:
        nonlocal looks
        looks += 1
        return is_all(cache, job, after)

    monkeypatch.setattr(LastIdCache, "is_all", counted)
    readers = 500

    async def test(stores: Stores) -> None:
        first = await stores.events.add("", "note", "before")
        waiting = [
            asyncio.create_task(stores.events.read("", after=first, wait_s=PATIENCE_S))
            for _ in range(readers)
        ]
        await asyncio.sleep(50 * LOOK_S)
        assert not any(task.done() for task in waiting)
        assert looks <= 4 * readers
        last = await stores.events.add("", "note", "after")
        found = await asyncio.gather(*waiting)
        assert [[event["id"] for event in events] for events in found] == [[last]] * readers

    with_stores(tmp_path, test)


def test_every_event_wakes_those_that_wait_for_it(tmp_path: Path) -> None:
    async def test(stores: Stores) -> None:
        events = stores.events
        after = await events.add("", "note", "first")
        for number in range(20):
            one = asyncio.create_task(events.read("", after=after, wait_s=PATIENCE_S))
            every = asyncio.create_task(events.read(EVERYWHERE, after=after, wait_s=PATIENCE_S))
            await asyncio.sleep(LOOK_S if number % 2 else 0.0)
            last = await events.add("", "note", str(number))
            assert [event["id"] for event in await one] == [last]
            assert [event["id"] for event in await every] == [last]
            after = last
        assert await events.read("", after=after, wait_s=2 * LOOK_S) == []

    with_stores(tmp_path, test)


def test_an_event_that_comes_as_a_reader_begins_to_wait_wakes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(stores: Stores) -> None:
        events, known = stores.events, []
        first = await events.add("", "note", "first")
        stored = events._newest.stored
        with monkeypatch.context() as patch:
            patch.setattr(events._newest, "stored", lambda job, id_: known.append((job, id_)))
            last = await events.add("", "note", "last")

        async def remember() -> None:
            for job, id_ in known:
                stored(job, id_)

        reading = asyncio.create_task(events.read("", after=first, wait_s=PATIENCE_S))
        await asyncio.gather(remember())  # after the reader has looked, before the first look
        found = await asyncio.wait_for(reading, PATIENCE_S / 2)
        assert [event["id"] for event in found] == [last]

    with_stores(tmp_path, test)
