"""Durations, time left, traffic and final values: one figure for page, terminal and report."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from atoll.config import parse_spec
from atoll.hub.http.progress import progress_of
from atoll.hub.http.views import describe_node, job_view
from atoll.hub.jobs.jobs import Job, Member
from atoll.hub.jobs.times import note_time, training_s, wall_s
from atoll.hub.nodes.store import Node
from atoll.hub.observability.latest import Latest
from atoll.hub.observability.traffic import Bytes
from atoll.hub.stores import Stores
from atoll.wire.messages import NodeInfo, Point
from atoll.wire.states import JobState, MemberState, NodeState
from tests.hub.durable import with_stores


def running(spec: str = "[train]\nsteps = 100", *, members: int = 2) -> Job:
    job = Job(job="x-1", created=0.0, spec=parse_spec(spec), state=JobState.RUNNING, started=10.0)
    for slot in range(members):
        name = f"w{slot}"
        job.members[name] = Member(member=name, slot=slot, node="n", state=MemberState.RUNNING)
    return job


def set_state(job: Job, state: JobState, now: float) -> None:
    job.state, job.ended = state, now if state.ended else None
    note_time(job, now)


def test_pauses_waits_and_stops_are_no_training() -> None:
    job = running()
    note_time(job, 10.0)
    job.paused = "too few members"
    note_time(job, 30.0)  # 20 s
    assert training_s(job, 99.0) == 20.0
    job.paused = ""
    note_time(job, 100.0)
    assert training_s(job, 105.0) == 25.0
    set_state(job, JobState.STOPPED, 110.0)  # 10 s more
    set_state(job, JobState.WAITING, 500.0)
    set_state(job, JobState.RUNNING, 510.0)
    set_state(job, JobState.DONE, 515.0)  # and 5
    assert training_s(job, 999.0) == 35.0
    assert wall_s(job, 999.0) == 505.0


def points(*found: tuple[float, int]) -> Latest:
    latest = Latest(step=found[-1][1])
    latest.recent.extend(found)
    return latest


def test_the_time_left_follows_the_newest_steps() -> None:
    job = running()
    note_time(job, 10.0)
    latest = {"w0": points((10.0, 0), (20.0, 20)), "w1": points((10.0, 0), (20.0, 10))}
    progress = progress_of(job, latest, swarm=None, now=20.0)
    assert (progress["step"], progress["fraction"], progress["left_s"]) == (20, 0.2, 40.0)
    latest["w0"].recent.append((30.0, 15))  # it went back to a checkpoint
    latest["w0"].recent.append((40.0, 35))
    latest["w0"].step = 35
    assert progress_of(job, latest, swarm=None, now=40.0)["left_s"] == 32.5


def test_without_new_points_the_average_tells_the_time_left() -> None:
    job = running()
    note_time(job, 10.0)
    latest = {"w0": Latest(step=25)}  # after a restart of the hub
    assert progress_of(job, latest, swarm=None, now=35.0)["left_s"] == 75.0
    job.paused = "too few members"
    assert progress_of(job, latest, swarm=None, now=35.0)["left_s"] is None


def test_a_script_without_a_total_has_no_share_done_and_no_end() -> None:
    job = running('[job]\nscript = "train.py"')
    note_time(job, 10.0)
    progress = progress_of(job, {"w0": points((10.0, 0), (20.0, 77))}, swarm=None, now=20.0)
    assert (progress["step"], progress["steps"], progress["fraction"], progress["left_s"]) == (
        77,
        0,
        0.0,
        None,
    )


def point(step: int, **values: float) -> Point:
    return Point(time=float(step), step=step, round=0, values=values)


def test_traffic_never_falls_and_adds_up_over_restarts(tmp_path: Path) -> None:
    async def first(stores: Stores) -> None:
        async def send(member: str, process: str, seq: int, sent: float, node: str) -> None:
            values = [point(seq, sent_bytes=sent, received_bytes=sent / 2)]
            await stores.metrics.add(
                "j", member, incarnation=process, seq=seq, points=values, node=node
            )

        await send("w0", "a", 1, 100.0, "lap1")
        await send("w0", "a", 2, 300.0, "lap1")
        await send("w1", "b", 1, 50.0, "lap2")
        await send("w0", "c", 1, 10.0, "lap2")  # restarted elsewhere: it counts anew
        await send("w0", "a", 2, 300.0, "lap1")  # repeated: counted once
        check(stores)

    async def second(stores: Stores) -> None:
        check(stores)  # after a restart of the hub
        sent = [item["values"]["sent_bytes"] for item in await stores.metrics.read("j")]
        assert sent == [100.0, 300.0, 50.0, 310.0]
        stores.metrics.forget("j")
        assert stores.metrics.traffic.of_job("j") == Bytes()
        assert stores.metrics.traffic.of_node("lap1") == Bytes(300.0, 150.0)

    def check(stores: Stores) -> None:
        traffic = stores.metrics.traffic
        members = [traffic.of_member("j", name) for name in ("w0", "w1")]
        nodes = [traffic.of_node(name) for name in ("lap1", "lap2")]
        assert members == [Bytes(310.0, 155.0), Bytes(50.0, 25.0)]
        assert nodes == [Bytes(300.0, 150.0), Bytes(60.0, 30.0)]
        assert traffic.of_job("j") == sum(members, Bytes()) == sum(nodes, Bytes())
        assert stores.metrics.latest("j")["w0"].values["sent_bytes"] == 310.0

    with_stores(tmp_path, first)
    with_stores(tmp_path, second)


def test_final_values_outlive_the_hub_and_a_last_point_without(tmp_path: Path) -> None:
    job = running(members=1)

    async def first(stores: Stores) -> None:
        found = [point(1, loss=2.0, held_out_loss=2.5), point(2, loss=1.5), point(3, tokens=9.0)]
        await stores.metrics.add("x-1", "w0", incarnation="a", seq=1, points=found)
        await stores.metrics.condense("x-1")

    async def second(stores: Stores) -> None:
        view = job_view(job, latest=stores.metrics.latest("x-1"), live={})
        assert (view["loss"], view["held_out_loss"]) == (1.5, 2.5)
        assert view["progress"]["step"] == 3
        assert view["loss_unit"] == "nats per token"

    with_stores(tmp_path, first)
    with_stores(tmp_path, second)


def shown(node: Node, *, connected: bool = True, running: tuple[str, ...] = ()) -> str:
    session: Any = SimpleNamespace(last_seen=0.0, stats={}) if connected else None
    view = describe_node(node, session, 1.0, running=list(running), measured=[], traffic=Bytes())
    return str(view["shown"])


def test_a_node_that_left_or_is_drained_is_no_fault() -> None:
    node = Node("lap1", NodeInfo("lap1", "Linux", "3.11", "1"), "i")
    assert shown(node) == NodeState.ONLINE
    node.draining = True
    assert shown(node, running=("x-1/w0",)) == NodeState.DRAINING
    assert shown(node) == NodeState.DRAINED
    assert shown(node, connected=False) == NodeState.LOST
    node.left = True
    assert shown(node, connected=False) == NodeState.LEFT
