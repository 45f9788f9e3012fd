"""The dashboard's stream: bounded per client, slow clients dropped, cursors honest."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from atoll.clock import VirtualClock
from atoll.hub import stream as stream_module
from atoll.hub.context import Context
from atoll.hub.endpoint import Refused
from atoll.hub.stores import Stores
from atoll.hub.stream import MAX_STREAMS, Cursors, Streams, make_tick
from atoll.wire.messages import Point
from tests.hub.durable import SPEC, with_stores


class Nobody:
    """The living half of a hub where nothing lives."""

    def nodes(self) -> list[dict[str, Any]]:
        return []

    def members(self, job: str) -> dict[str, dict[str, Any]]:
        return {}

    async def rounds(self, job: str, *, after: int = 0, limit: int = 200) -> list[dict[str, Any]]:
        return []

    async def submit(self, job: str) -> None: ...

    async def stop(self, job: str, *, grace_s: float) -> None: ...

    async def resume(self, job: str, *, spec: str = "") -> str:
        return job

    def relay(self) -> dict[str, float]:
        return {}


def context_of(stores: Stores) -> Context:
    return Context(stores, Nobody(), VirtualClock(), "0", 0.0, "atoll://h:1/s")


def request(query: str = "") -> Request:
    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    return Request(scope | {"query_string": query.encode()})


async def connected() -> dict[str, Any]:
    await asyncio.Event().wait()
    return {}


def test_a_client_that_takes_nothing_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "SEND_TIMEOUT_S", 0.05)

    async def test(stores: Stores) -> None:
        streams, bodies = Streams(), 0

        async def stuck(message: Any) -> None:
            nonlocal bodies
            if message["type"] == "http.response.body":
                bodies += 1
                await asyncio.Event().wait()

        response = await streams.answer(request(), context_of(stores))
        await response({"type": "http"}, connected, stuck)
        assert (streams.open, bodies) == (0, 1)

    with_stores(tmp_path, test)


def test_a_client_that_goes_frees_its_place(tmp_path: Path) -> None:
    async def test(stores: Stores) -> None:
        streams = Streams()

        async def gone() -> dict[str, Any]:
            return {"type": "http.disconnect"}

        async def taken(message: Any) -> None:
            assert streams.open == 1

        response = await streams.answer(request(), context_of(stores))
        await response({"type": "http"}, gone, taken)
        assert streams.open == 0

    with_stores(tmp_path, test)


def test_too_many_dashboards_are_refused(tmp_path: Path) -> None:
    async def test(stores: Stores) -> None:
        streams = Streams()
        streams.open = MAX_STREAMS
        with pytest.raises(Refused, match="too many dashboards") as refused:
            await streams.answer(request(), context_of(stores))
        assert refused.value.status == 503

    with_stores(tmp_path, test)


def test_a_long_history_comes_in_bounded_ticks_without_gap_or_double(tmp_path: Path) -> None:
    async def test(stores: Stores) -> None:
        job = (await stores.jobs.create(SPEC, files={})).job
        points = [Point(0.0, n, 0, {"loss": 1.0, "grad_norm": 2.0}) for n in range(4500)]
        for start in range(0, 4500, 1500):
            await stores.metrics.add(
                job, f"w{start}", incarnation="i", seq=1, points=points[start : start + 1500]
            )
        await stores.logs.add(job, "w0", source="s", seq=1, lines=[str(n) for n in range(900)])
        context, cursors = context_of(stores), Cursors(job)
        steps, sizes, more = [], [], True
        while more:
            tick, more = await make_tick(context, job, cursors)
            steps += [point["step"] for point in tick["points"]]
            sizes.append(len(tick["points"]))
            assert all(point["values"] == {"loss": 1.0} for point in tick["points"])
            cursors = Cursors.read(str(cursors), job)
        assert (steps, sizes) == (list(range(4500)), [2000, 2000, 500])
        tick, _ = await make_tick(context, job, cursors)
        assert (tick["points"], tick["events"], tick["lines"]) == ([], [], [])

    with_stores(tmp_path, test)


@pytest.mark.parametrize("text", ["", "x", "other:1,2,3,4", "j:1,2,3", "j:a,b,c,d", ":::"])
def test_an_id_that_is_no_cursor_starts_afresh(text: str) -> None:
    assert str(Cursors.read(text, "j")) == "j:0,0,0,-1"
