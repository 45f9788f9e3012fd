"""A running job whose lines become worse gets another interval and codec, which is said."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import pytest

from atoll.clock import VirtualClock
from atoll.hub.app import Hub, HubOptions
from atoll.hub.planning.changes import LASTS_S
from atoll.hub.planning.replanning import KIND, Replanner
from atoll.hub.server import HubServer
from atoll.wire.messages import Register
from tests.dashboard.scene import MACHINES, Scene
from tests.patience import PATIENCE_S

SPEC = """
[job]
name = "planned"
nodes = 2
planned = ["every", "codec"]
[model]
layers = 1
width = 32
heads = 2
context = 32
[train]
steps = 4000
[strategy]
preset = "local-sgd"
codec = "auto:fp32"
every = 10
"""
SLOW = {"latency_ms": 900.0, "up_bps": 1e5, "down_bps": 1e5}


def hub_of(server: HubServer) -> Hub:
    assert server.hub is not None
    return server.hub


def serving(folder: Path) -> HubServer:
    return HubServer(
        HubOptions(data=folder / "data", jobs=folder / "jobs", reducers=False, dead_after_s=3600.0)
    )


def submit(scene: Scene) -> str:
    return str(scene.http.post("/api/jobs", json={"spec": SPEC, "files": {}}).json()["job"])


def event_texts(scene: Scene, job: str) -> list[str]:
    events = scene.http.get(f"/api/jobs/{job}/events").json()["events"]
    return [event["text"] for event in events if event["kind"] == KIND]


def slower_lines(scene: Scene, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for node in {row["node"] for row in scene.view(job)["members"]}:
        about, stats = MACHINES[node]
        monkeypatch.setitem(MACHINES, node, (about, {**stats, **SLOW}))


def test_who_starts_a_little_later_has_not_come(tmp_path: Path) -> None:
    with serving(tmp_path) as server, Scene(server) as scene:
        hub = hub_of(server)
        hub.replanner.clock = clock = VirtualClock()
        job = submit(scene)
        names = [member["member"] for member in scene.placed(job)]
        scene.connect(f"{job}/reducer")
        members = []
        for name in names:
            members.append(scene.connect(f"{job}/{name}"))
            members[-1].request(Register())
            server.call(hub.replanner.look(), timeout_s=PATIENCE_S)
        scene.round(members, 0)
        for _ in range(3):
            clock.advance(2 * LASTS_S)
            server.call(hub.replanner.look(), timeout_s=PATIENCE_S)
        assert (event_texts(scene, job), hub.planner.started) == ([], 0)


def test_slower_lines_give_a_longer_interval_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path) as server, Scene(server) as scene:
        hub = hub_of(server)
        job = submit(scene)
        members = scene.start(job)
        scene.round(members, 0)
        server.call(hub.replanner.look(), timeout_s=PATIENCE_S)
        assert (event_texts(scene, job), hub.planner.started) == ([], 0)

        slower_lines(scene, job, monkeypatch)
        deadline = time.monotonic() + 3 * PATIENCE_S
        while not event_texts(scene, job):
            assert time.monotonic() < deadline
            server.call(hub.replanner.look(), timeout_s=3 * PATIENCE_S)
            time.sleep(0.2)  # it has to last for a while
        assert hub.planner.started == 1
        (text,) = event_texts(scene, job)
        assert text.startswith("planned again: ")
        scene.round(members, 1)
        runtime = hub.rounds.runtime(job)
        verdict = runtime.verdicts[max(runtime.verdicts)]
        every = verdict.every
        assert every > 10
        assert verdict.codec in ("bf16", "int8:256")
        said = f"every {every} instead of 10, codec {verdict.codec}, because "
        assert text.startswith(f"planned again: {said}")
        assert "slower" in text
        scene.round(members, 2)
        after = runtime.verdicts[max(runtime.verdicts)]
        assert (after.every, after.codec) == (every, "")  # from there on members measure
    with serving(tmp_path) as server:
        assert hub_of(server).rounds.machine(job).commit_log.every == every


def test_a_plan_for_a_job_that_has_ended_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path) as server, Scene(server) as scene:
        hub = hub_of(server)
        job = submit(scene)
        scene.round(scene.start(job), 0)
        runtime, asked = hub.rounds.runtime(job), []

        async def ask(*_: Any, **__: Any) -> dict[str, Any]:
            asked.append(job)
            hub.rounds.close(job)
            return {"answers": {"every": 77}}

        monkeypatch.setattr(hub.planner, "ask", ask)
        record = hub.stores.jobs.get(job)
        server.call(hub.replanner._again(record, {}, "its lines are slower"))
        assert asked == [job]
        assert event_texts(scene, job) == []
        assert runtime.machine.commit_log.every != 77


def test_looks_go_on_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.hub.planning.replanning.LOOK_EVERY_S", 0.0)
    looks: list[int] = []

    class Failing(Replanner):
        async def look(self) -> None:
            looks.append(len(looks))
            if len(looks) > 1:
                raise asyncio.CancelledError  # enough
            raise KeyError("answers")

    nothing: Any = None
    looking = Failing(nothing, planner=nothing, nodes=list, clock=VirtualClock())
    with contextlib.suppress(asyncio.CancelledError, KeyError):
        asyncio.run(looking.run())
    assert looks == [0, 1]
