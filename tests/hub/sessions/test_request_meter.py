"""A session that sends too much waits; the others do not."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

import atoll.hub.sessions.session as session_module
from atoll.clock import Clock, RealClock, VirtualClock
from atoll.hub.alarms.watch import AlarmIntervals
from atoll.hub.db.database import Database
from atoll.hub.quotas.limits import Quotas
from atoll.hub.security.auth import Identity
from atoll.hub.server import HubServer
from atoll.hub.sessions.request_meter import (
    BURST,
    FRAMES_PER_S,
    MOST_PAUSE_S,
    RequestMeter,
    cost_of,
)
from atoll.hub.sessions.send_queue import SendQueue
from atoll.hub.sessions.session import Session, Sessions
from atoll.hub.tasks import Tasks
from atoll.net.endpoint import HubEndpoint
from atoll.net.http.client import HubClient
from atoll.wire.messages import (
    Beat,
    Event,
    LogLines,
    Metrics,
    Point,
    QueueEntry,
    QueuePut,
    QueuePutMany,
    pack,
)
from tests.hub.peer import Peer
from tests.patience import PATIENCE_S
from tests.security.conftest import serving, stores_of, until


def test_a_burst_is_free_and_the_long_run_has_a_rate() -> None:
    meter = RequestMeter()
    assert sum(meter.took(100.0) for _ in range(int(BURST))) == 0.0
    now = 100.0
    for _ in range(20_000):
        now += meter.took(now)
    assert 20_000 / (now - 100.0) < 1.1 * FRAMES_PER_S
    assert meter.frames == BURST + 20_000
    assert meter.paused_s > 0
    assert not any(meter.took(now + 100 + n / (FRAMES_PER_S / 2)) for n in range(20_000))


def test_one_pause_is_short() -> None:
    meter = RequestMeter()
    assert max(meter.took(0.0) for _ in range(50_000)) == MOST_PAUSE_S


def test_reports_and_lines_count_as_what_they_cost() -> None:
    assert cost_of(Beat(), 50) == 1.0
    one = cost_of(LogLines("j", "w0", 1, ["x"]), 100)
    many = cost_of(LogLines("j", "w0", 1, ["x" * 200] * 500), 100_000)
    assert 5 < one < 10
    assert many > 50
    assert cost_of(QueuePut(queue="q", key="k", payload=b""), 2**20) == 133.0
    few = cost_of(QueuePutMany("q", [QueueEntry("k", b"")] * 5), 100)
    assert few < cost_of(QueuePutMany("q", [QueueEntry("k", b"")] * 1_000), 100) / 10
    point = Point(time=0.0, step=1, round=0, values={f"m{n}": 0.0 for n in range(50)})
    assert cost_of(Metrics("i", 1, [point]), 1_000) > cost_of(Event("note", "x"), 1_000) > 5


def test_a_session_hands_over_although_all_its_frames_have_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To receive what has come already does not wait, so it has to let the others in itself."""
    monkeypatch.setattr(session_module, "TURN_S", 0.0)
    assert turns_beside(frames=1_000, wait=False) > 500


def test_a_session_that_waited_for_its_frame_has_handed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A turn more for each frame cost a thousand producers an eighth of their rate."""
    monkeypatch.setattr(session_module, "TURN_S", 3_600.0)
    clock = VirtualClock()
    assert turns_beside(frames=100, wait=True, clock=clock) < 110
    assert clock.monotonic() > 100 * 3_600.0


def turns_beside(*, frames: int, wait: bool, clock: Clock | None = None) -> int:
    """Return how often another task gets its turn while a session reads so many frames."""
    left, turns = [pack(Beat())] * frames, 0
    time = clock or RealClock()

    async def receive() -> dict[str, object]:
        if wait:
            assert isinstance(time, VirtualClock)
            time.advance(2 * 3_600.0)
            await asyncio.sleep(0)
        if left:
            return {"type": "websocket.receive", "bytes": left.pop()}
        return {"type": "websocket.disconnect"}

    async def other() -> None:
        nonlocal turns
        while left:
            turns += 1
            await asyncio.sleep(0)

    async def both() -> None:
        unused: Any = None
        sessions = Sessions(auth=unused, clock=time, tasks=Tasks())
        session = Session(
            "j/w0", "i1", Identity("job", "j", "w0"), None, SendQueue(on_written=unused), 0.0,
            meter=RequestMeter(0.0),
        )  # fmt: skip
        beside = asyncio.create_task(other())
        await sessions._read(session, receive)
        await beside

    asyncio.run(both())
    return turns


def test_reports_of_one_session_are_stored_in_turns(tmp_path: Path) -> None:
    """However many it sends, one of them is in a transaction: others' votes wait for one only."""
    with serving(tmp_path) as hub, operator(hub) as client:
        job = client.submit("[job]\nname = 'toy'\nnodes = 2\n")
        database, sessions = stores_of(hub).database, hub.hub.sessions  # type: ignore[union-attr]
        gate = threading.Event()
        with Peer(hub, f"{job}/w0") as flood, Peer(hub, f"{job}/w1") as other:
            hub.call(begin(database, gate))
            try:
                ids = [flood.ask(LogLines(job, "w0", 1 + 10 * n, ["x"] * 10)) for n in range(50)]
                note = other.ask(Event("note", "I get through"))
                until(lambda: open_requests(sessions) == len(ids) + 1)
                waiting = len(database._gathered)
            finally:
                gate.set()
            assert waiting < 10
            other.answer(note)
            for id in ids:
                flood.answer(id)
        assert len(client.logs(job, tail=1_000)["lines"]) == 500


async def begin(database: Database, gate: threading.Event) -> None:
    """Keep the writer thread busy until the gate opens."""
    database.write_later(lambda _: gate.wait(PATIENCE_S), bool)


def open_requests(sessions: Sessions) -> int:
    return sum(len(session.requests) for session in sessions.all())


def test_a_flood_waits_on_its_own_line_and_is_named(tmp_path: Path) -> None:
    intervals = AlarmIntervals(every_s=0.1, patience=0.01)
    quotas = Quotas(frames_per_s=100)  # how fast a busy hub reads is no limit then
    with (
        serving(tmp_path, alarm_intervals=intervals, quotas=quotas) as hub,
        operator(hub) as client,
    ):
        job = client.submit("[job]\nname = 'toy'\nnodes = 2\n")
        with Peer(hub, f"{job}/w0") as flood, Peer(hub, f"{job}/w1") as other:
            frame = pack(Beat())
            for _ in range(10 * quotas.frames_per_s):
                flood.socket.send(frame)
            other.request(Event("note", "I get through"))
            named = until(lambda: [a for a in client.alarms() if a["kind"] == "limit-reached"])
            assert named
            assert f"{job}/w0" in named[0]["cause"]
            assert len(named) == 1


def operator(hub: HubServer) -> HubClient:
    return HubClient(hub.url, hub.operator_token, endpoint=HubEndpoint(ca=hub.ca))
