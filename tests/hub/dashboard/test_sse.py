"""The dashboard's stream: bounded per client, slow clients dropped, cursors honest."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from atoll.clock import VirtualClock
from atoll.hub.dashboard import snapshot as snapshot_module
from atoll.hub.dashboard import sse as stream_module
from atoll.hub.dashboard.snapshot import SnapshotSource, coarse_age
from atoll.hub.dashboard.sse import (
    MAX_OF_ONE,
    MAX_OF_OTHERS,
    MAX_STREAMS,
    Cursors,
    EventStreams,
    Feed,
)
from atoll.hub.http import jobs
from atoll.hub.http.context import Context
from atoll.hub.http.endpoint import HttpRefused
from atoll.hub.security.auth import Identity
from atoll.hub.stores import Stores
from atoll.wire.messages import Point
from atoll.wire.states import JobState
from tests.hub.durable import SPEC, with_stores
from tests.patience import PATIENCE_S


class EmptyHub:
    """The living half of a hub where nothing lives."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.looks = 0

    def nodes(self) -> list[dict[str, Any]]:
        self.looks += 1
        return self.rows

    def members(self, job: str) -> dict[str, dict[str, Any]]:
        return {}

    def swarm(self, job: str) -> dict[str, Any] | None:
        return None

    def paths(self, job: str) -> dict[str, Any] | None:
        return None

    async def rounds(self, job: str, *, after: int = 0, limit: int = 200) -> list[dict[str, Any]]:
        return []

    async def submit(self, job: str) -> None: ...

    async def stop(self, job: str, *, grace_s: float) -> None: ...

    async def resume(self, job: str, *, spec: str = "", checkpoint: int | None = None) -> str:
        return job

    async def scale(self, job: str, *, least: int, most: int) -> None: ...

    def relay(self) -> dict[str, float]:
        return {}


def context_of(stores: Stores, live: EmptyHub | None = None) -> Context:
    return Context(stores, live or EmptyHub(), VirtualClock(), "0", 0.0, lambda: "atoll://h:1/s")


OPERATOR = Identity("operator", "operator")


def request(
    query: str = "",
    *,
    login: Identity = OPERATOR,
    headers: Sequence[tuple[bytes, bytes]] = (),
) -> Request:
    scope = {"type": "http", "method": "GET", "path": "/", "headers": list(headers)}
    state = {"identity": login}
    return Request(scope | {"query_string": query.encode(), "state": state})


def feed_of(
    context: Context, snapshots: SnapshotSource, *, job: str = "", role: str = "operator"
) -> Feed:
    return Feed(context, snapshots, Cursors(job), role=role)


async def tick_of(feed: Feed) -> tuple[dict[str, Any], bool]:
    parts, more = await feed.tick()
    tick: dict[str, Any] = json.loads(b"".join(parts))
    return tick, more


async def next_tick(snapshots: SnapshotSource) -> None:
    """Wait until another snapshot is due."""
    await asyncio.sleep(snapshots.pause_s())


@pytest.fixture
def long_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tick ends by itself: on a busy machine it might between any two lines of a test."""
    monkeypatch.setattr(snapshot_module, "INTERVAL_S", 1e9)


def end_tick(snapshots: SnapshotSource) -> None:
    """Let the snapshot be of the tick before."""
    assert snapshots._picture is not None
    snapshots._picture.made -= snapshot_module.INTERVAL_S


async def connected() -> dict[str, Any]:
    await asyncio.Event().wait()
    return {}


def test_a_client_that_takes_nothing_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "SEND_TIMEOUT_S", 0.05)

    async def test(stores: Stores) -> None:
        streams, bodies = EventStreams(), 0

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
        streams = EventStreams()

        async def gone() -> dict[str, Any]:
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            assert streams.open == 1

        response = await streams.answer(request(), context_of(stores))
        await response({"type": "http"}, gone, send)
        assert streams.open == 0

    with_stores(tmp_path, test)


def test_too_many_dashboards_are_refused(tmp_path: Path) -> None:
    async def test(stores: Stores) -> None:
        streams = EventStreams()
        streams.by_login[OPERATOR] = MAX_STREAMS
        with pytest.raises(HttpRefused, match="too many dashboards") as refused:
            await streams.answer(request(), context_of(stores))
        assert refused.value.status == 503

    with_stores(tmp_path, test)


def test_one_viewer_leaves_room_for_others_and_all_for_operators(tmp_path: Path) -> None:
    async def test(stores: Stores) -> None:
        streams, context = EventStreams(), context_of(stores)
        streams.by_login[Identity("viewer", "anna")] = MAX_OF_ONE
        await streams.answer(request(login=Identity("viewer", "ben")), context)
        with pytest.raises(HttpRefused, match="too many dashboards"):
            await streams.answer(request(login=Identity("viewer", "anna")), context)
        streams.by_login[Identity("viewer", "carl")] = MAX_OF_OTHERS - MAX_OF_ONE
        with pytest.raises(HttpRefused, match="too many dashboards"):
            await streams.answer(request(login=Identity("viewer", "ben")), context)
        await streams.answer(request(), context)

    with_stores(tmp_path, test)


@pytest.fixture
def worthless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the value of nodes out: there are no rounds."""

    async def nothing(*_: object) -> dict[str, Any]:
        return {}

    monkeypatch.setattr(snapshot_module, "node_value", nothing)


@pytest.mark.usefixtures("worthless")
def test_a_job_deleted_while_it_is_read_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(stores: Stores) -> None:
        job = (await stores.jobs.create(SPEC, files={})).job
        read = stores.metrics.read

        async def deleted(*args: Any, **named: Any) -> Any:
            stores.jobs._jobs.pop(job)
            return await read(*args, **named)

        monkeypatch.setattr(stores.metrics, "read", deleted)
        context = context_of(stores)
        feed = feed_of(context, SnapshotSource(context), job=job)
        tick, more = await tick_of(feed)
        assert (tick["deleted"], more, feed.cursors.job) == (job, False, "")
        assert "points" not in tick

    with_stores(tmp_path, test)


@pytest.mark.usefixtures("worthless")
def test_a_job_deleted_before_its_stream_begins_is_told_so(tmp_path: Path) -> None:
    async def test(stores: Stores) -> None:
        query = request(query="job=gone-20260101-120000")
        response = await EventStreams().answer(query, context_of(stores))
        tick, _ = await tick_of(response._feed)  # type: ignore[attr-defined]
        assert tick["deleted"] == "gone-20260101-120000"

    with_stores(tmp_path, test)


@pytest.mark.usefixtures("worthless")
def test_long_history_streams_without_gap_or_duplicate(tmp_path: Path) -> None:
    async def test(stores: Stores) -> None:
        job = (await stores.jobs.create(SPEC, files={})).job
        points = [Point(0.0, n, 0, {"loss": 1.0, "grad_norm": 2.0}) for n in range(4500)]
        for start in range(0, 4500, 1500):
            await stores.metrics.add(
                job, f"w{start}", incarnation="i", seq=1, points=points[start : start + 1500]
            )
        await stores.logs.add(job, "w0", source="s", seq=1, lines=[str(n) for n in range(900)])
        context = context_of(stores)
        snapshots = SnapshotSource(context)
        feed, steps, sizes, more = feed_of(context, snapshots, job=job), [], [], True
        while more:
            tick, more = await tick_of(feed)
            steps += [point["step"] for point in tick["points"]]
            sizes.append(len(tick["points"]))
            assert all(
                point["values"] == {"loss": 1.0, "grad_norm": 2.0} for point in tick["points"]
            )
            feed.cursors = Cursors.read(str(feed.cursors), job)
        assert (steps, sizes) == (list(range(4500)), [2000, 2000, 500])
        tick, _ = await tick_of(feed)
        assert (tick["points"], tick["events"], tick["lines"]) == ([], [], [])

    with_stores(tmp_path, test)


def row(node: str, **more: Any) -> dict[str, Any]:
    return {"node": node, "last_seen_s": 1.0, "stats": {}, "info": {"cores": 4}, **more}


@pytest.mark.usefixtures("long_tick")
def test_pages_get_all_once_and_then_only_what_changed(tmp_path: Path) -> None:
    async def test(stores: Stores) -> None:
        live = EmptyHub()
        live.rows = [row("a"), row("b", stats={"cpu_percent": 1.0})]
        context = context_of(stores, live)
        snapshots = SnapshotSource(context)
        early, late = feed_of(context, snapshots), feed_of(context, snapshots)
        tick, _ = await tick_of(early)
        assert tick["full"] is True
        assert [one["node"] for one in tick["nodes"]] == ["a", "b"]
        end_tick(snapshots)
        live.rows = [row("b", stats={"cpu_percent": 2.0}, last_seen_s=3.0), row("c")]
        looks = live.looks
        tick, _ = await tick_of(early)
        assert tick["full"] is False
        assert tick["nodes"] == [
            {"node": "b", "stats": {"cpu_percent": 2.0}}, row("c") | {"last_seen_s": 0}
        ]  # fmt: skip
        assert tick["gone"] == {"nodes": ["a"], "jobs": []}
        assert "queues" not in tick
        tick, _ = await tick_of(late)
        assert tick["full"] is True
        assert [one["node"] for one in tick["nodes"]] == ["b", "c"]
        assert live.looks == looks + 1, "all pages share one look"
        tick, _ = await tick_of(late)  # requested again within the same tick
        assert (tick["full"], "nodes" in tick) == (False, False)

    with_stores(tmp_path, test)


@pytest.mark.usefixtures("long_tick")
def test_a_page_that_goes_to_a_job_does_not_get_all_again(tmp_path: Path) -> None:
    async def test(stores: Stores) -> None:
        live = EmptyHub()
        live.rows = [row("a")]
        context, streams = context_of(stores, live), EventStreams()
        first = await first_tick(streams, request(), context)
        again = await first_tick(streams, request(f"since={first['number']}"), context)
        assert (first["full"], again["full"], "nodes" in again) == (True, False, False)
        older = await first_tick(streams, request(f"since={first['number'] - 5}"), context)
        assert [one["node"] for one in older["nodes"]] == ["a"]

    with_stores(tmp_path, test)


async def first_tick(streams: EventStreams, query: Request, context: Context) -> dict[str, Any]:
    """Return the first tick of a stream; the client goes after it."""
    body = await first_body(streams, query, context)
    found: dict[str, Any] = json.loads(body.partition(b"data: ")[2])
    return found


async def first_body(streams: EventStreams, query: Request, context: Context) -> bytes:
    sent, bodies = asyncio.Event(), list[bytes]()

    async def gone_after_one() -> dict[str, Any]:
        await sent.wait()
        return {"type": "http.disconnect"}

    async def take(message: Any) -> None:
        if message["type"] == "http.response.body":
            bodies.append(message["body"])
            sent.set()

    await (await streams.answer(query, context))({"type": "http"}, gone_after_one, take)
    return bodies[0]


def test_ticks_are_compressed_and_the_ticket_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "rss_bytes", lambda: 10**8)  # lengths are compared

    async def test(stores: Stores) -> None:
        live = EmptyHub()
        live.rows = [row(f"node-{number}", said="atoll://h:1/s") for number in range(100)]
        context, streams = context_of(stores, live), EventStreams()
        plain = await first_body(streams, request(), context)
        accepts = [(b"accept-encoding", b"gzip, deflate, br")]
        packed = await first_body(streams, request(headers=accepts), context)
        assert len(packed) < len(plain) / 4
        unpack = zlib.decompressobj(wbits=31)
        tick = json.loads(unpack.decompress(packed).partition(b"data: ")[2])
        assert (len(tick["nodes"]), tick["hub"]["ticket"]) == (100, "atoll://h:1/s")
        # What a machine says, the ticket itself too, does not change how long its part is.
        live.rows = [row(f"node-{number}", said="atoll://h:1/t") for number in range(100)]
        other = await first_body(EventStreams(), request(headers=accepts), context_of(stores, live))
        assert len(other) == len(packed)

    with_stores(tmp_path, test)


def test_what_ticks_leave_out_is_in_the_next_whole_picture(tmp_path: Path) -> None:
    async def test(stores: Stores) -> None:
        live = EmptyHub()
        live.rows = [row("a")]
        context = context_of(stores, live)
        snapshots = SnapshotSource(context)
        slow, other = feed_of(context, snapshots), feed_of(context, snapshots)
        await tick_of(slow)
        for cores in (5, 6):
            await next_tick(snapshots)
            live.rows = [row("a", info={"cores": cores})]
            await tick_of(other)
        tick, _ = await tick_of(slow)  # missed one: the change between two snapshots is not enough
        assert (tick["full"], tick["nodes"][0]["info"]) == (True, {"cores": 6})

    with_stores(tmp_path, test)


def test_only_operators_get_the_ticket(tmp_path: Path) -> None:
    async def test(stores: Stores) -> None:
        context = context_of(stores)
        snapshots = SnapshotSource(context)
        for role, secret in (("operator", True), ("viewer", False)):
            tick, _ = await tick_of(feed_of(context, snapshots, role=role))
            assert tick["hub"]["role"] == role
            assert ("ticket" in tick["hub"]) is secret

    with_stores(tmp_path, test)


def test_an_ended_job_is_not_described_at_every_tick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(stores: Stores) -> None:
        monkeypatch.setattr(snapshot_module, "OVER_FOR_S", PATIENCE_S)
        looks: list[str] = []
        view_of = jobs.view_of

        def counted(context: Context, job: str) -> dict[str, Any]:
            looks.append(job)
            return view_of(context, job)

        monkeypatch.setattr(snapshot_module, "view_of", counted)
        over = (await stores.jobs.create(SPEC, files={})).job
        await stores.jobs.update(over, state=JobState.FAILED, reason="it broke")
        waits = (await stores.jobs.create(SPEC, files={})).job
        context = context_of(stores)
        snapshots = SnapshotSource(context)
        feed = feed_of(context, snapshots)
        for _ in range(3):
            await tick_of(feed)
            await next_tick(snapshots)
        assert looks.count(waits) == 3
        assert looks.count(over) == 1

    with_stores(tmp_path, test)


@pytest.mark.parametrize(
    ("seconds", "shown"), [(None, None), (0.2, 0), (5.9, 0), (7.0, 5), (64.0, 60), (8000.0, 7200)]
)
def test_ages_rest_between_steps(seconds: float | None, shown: int | None) -> None:
    assert coarse_age(seconds) == shown


@pytest.mark.parametrize(
    "text", ["", "x", "other:1,2,3,4", "j:1,2,3", "j:a,b,c,d", ":::", f"j:1,{2**63},3,4"]
)
def test_an_id_that_is_no_cursor_starts_afresh(text: str) -> None:
    assert str(Cursors.read(text, "j")) == "j:0,-1,-1,-1"
