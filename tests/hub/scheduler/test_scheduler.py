from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.config import parse_spec
from atoll.hub.app import HubOptions
from atoll.hub.jobs.completion import outcome
from atoll.hub.jobs.jobs import Job, Member
from atoll.hub.scheduler import reducer_clients as reducers_module
from atoll.hub.scheduler.assign import spread
from atoll.hub.server import HubServer
from atoll.wire.messages import Done, Finished, ProcessState, RoundJoin, RoundPlan, Stop
from atoll.wire.states import MemberState, ProcessPhase
from tests.hub.membership import (
    Running,
    commands,
    job_of,
    launches,
    options,
    registered,
    until,
)
from tests.hub.peer import Peer, member, node, submit
from tests.patience import PATIENCE_S


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer(options(tmp_path)) as server:
        yield server


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 4)), st.integers(1, 12))
def test_spread_is_as_even_as_the_free_places_allow(free: dict[str, int], wanted: int) -> None:
    chosen = Counter(spread(free, wanted))
    if sum(free.values()) < wanted:
        assert not chosen
        return
    assert chosen.total() == wanted
    assert all(chosen[node] <= free[node] for node in chosen)
    open_nodes = [node for node in free if chosen[node] < free[node]]
    assert all(chosen[busy] - chosen[node] <= 1 for busy in chosen for node in open_nodes)


def members(*states: str, error: dict[str, str] | None = None) -> dict[str, Member]:
    named = [
        Member(member=f"w{i}", slot=i, node="n", state=MemberState(state))
        for i, state in enumerate(states)
    ]
    named[0].error = error
    return {m.member: m for m in named}


@pytest.mark.parametrize(
    ("states", "kind", "stopping", "expected"),
    [
        (("running", "done"), "", False, None),
        (("done", "done"), "", False, "done"),
        (("lost", "done"), "", False, "done"),
        (("lost", "failed"), "", False, None),
        (("failed", "running"), "LossNotFinite", False, "failed"),
        (("failed", "running"), "OutOfMemory", False, None),
        (("failed", "failed"), "OutOfMemory", False, None),
        (("failed",), "OutOfMemory", False, "failed"),
        (("failed", "running"), "ScriptError", False, "failed"),
        (("failed", "running"), "NotAllowed", False, None),
        (("failed",), "NotAllowed", False, "failed"),
        (("done", "stopped"), "", True, "stopped"),
        (("stopped", "running"), "", True, None),
    ],
)
def test_outcome(states: tuple[str, ...], kind: str, stopping: bool, expected: str | None) -> None:
    error = {"kind": kind, "what": "x"} if kind else None
    named = members(*states, error=error)
    spec = parse_spec(f"[job]\nnodes = {len(states)}")
    job = Job(job="j", created=0.0, spec=spec, members=named, stopping=stopping, committed_round=1)
    end = outcome(job)
    assert (end[0] if end else None) == expected


@pytest.mark.parametrize(
    ("states", "code", "retried", "expected"),
    [
        (("failed", "running"), 3, 0, None),  # one more try
        (("failed", "running"), 3, 1, "failed"),
        (("failed",), -11, 1, "failed"),  # it crashed
        (("failed",), -9, 1, None),  # somebody killed it: it is launched again
        (("failed",), 137, 1, None),
        (("done", "running"), None, 0, None),
        (("done", "lost"), None, 0, None),
        (("done", "done"), None, 0, "done"),
    ],
)
def test_outcome_of_commands(
    states: tuple[str, ...], code: int | None, retried: int, expected: str | None
) -> None:
    named = members(*states)
    named["w0"].exit_code, named["w0"].retried = code, retried
    spec = parse_spec(f'[job]\ncommand = ["true"]\nretries = 1\nnodes = {len(states)}')
    job = Job(job="j", created=0.0, spec=spec, members=named)
    end = outcome(job)
    assert (end[0] if end else None) == expected


def test_job_waits_with_its_reason_until_nodes_are_free(hub: HubServer) -> None:
    job = submit(hub, nodes=4)
    assert job_of(hub, job).state == "waiting"
    assert job_of(hub, job).reason == "needs 4 nodes, 0 are free (no machine has joined yet)"
    with node(hub, "a") as a:
        until(lambda: job_of(hub, job).reason == "needs 4 nodes, 2 are free")
        with node(hub, "b") as b:
            until(lambda: job_of(hub, job).state == "running")
            by_node = Counter(m.node for m in job_of(hub, job).members.values())
            assert by_node == {a.session: 2, b.session: 2}


def test_launch_carries_spec_files_and_a_token_of_its_job(hub: HubServer) -> None:
    assert hub.hub is not None
    spec = '[job]\nname = "mine"\nnodes = 1\nscript = "train.py"\n'
    with node(hub, "a") as agent:
        stores = hub.hub.stores
        job = hub.call(stores.jobs.create(spec, files={"train.py": "print(1)"})).job
        hub.call(hub.hub.live.submit(job))
        launch = launches(agent, 1)["w0"]
        assert (launch.job, launch.slot, launch.attempt) == (job, 0, 1)
        assert launch.files == {"train.py": "print(1)"}
        assert 'script = "train.py"' in launch.spec
        assert stores.auth.authenticate(launch.token).name == job


def test_places_are_free_again_when_a_job_ended(hub: HubServer) -> None:
    with node(hub, "a", slots=1) as agent:
        first, second = submit(hub, nodes=1), submit(hub, nodes=1)
        text = "needs 1 node, 0 are free (a: busy)"
        assert job_of(hub, second).reason == text
        with member(hub, launches(agent, 1)["w0"]) as w0:
            registered(w0)
            w0.request(Finished(True))
        until(lambda: job_of(hub, first).state == "done")
        until(lambda: job_of(hub, second).state == "running")
        assert launches(agent, 1)["w0"].job == second


def test_small_job_starts_though_a_large_one_waits(hub: HubServer) -> None:
    with node(hub, "a"):
        large, small = submit(hub, nodes=9), submit(hub, nodes=1)
        assert job_of(hub, large).state == "waiting"
        assert job_of(hub, small).state == "running"


def test_waiting_job_is_stopped_at_once(hub: HubServer) -> None:
    assert hub.hub is not None
    job = submit(hub, nodes=1)
    hub.call(hub.hub.live.stop(job, grace_s=1))
    stopped = job_of(hub, job)
    assert (stopped.state, stopped.reason) == ("stopped", "cancelled before starting")


def test_job_that_is_stopped_while_it_starts_does_not_run(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hub.hub is not None
    live, jobs = hub.hub.live, hub.hub.stores.jobs
    assign, starts = jobs.members.assign, asyncio.Event()

    async def slow_assign(*args: Any, **options: Any) -> Any:
        starts.set()
        await asyncio.sleep(0.1)
        return await assign(*args, **options)

    async def stop_at_its_start() -> str:
        job = (await jobs.create("[job]\nnodes = 1\n", files={})).job
        starting = asyncio.ensure_future(live.submit(job))
        await starts.wait()
        await live.stop(job, grace_s=60.0)
        await starting
        return job

    monkeypatch.setattr(jobs.members, "assign", slow_assign)
    with node(hub, "a"):
        job = hub.call(stop_at_its_start(), timeout_s=PATIENCE_S)
        assert job_of(hub, job).stopping


def test_stop_is_in_the_next_plan_and_the_job_ends_stopped(hub: HubServer) -> None:
    assert hub.hub is not None
    group = Running(hub)
    assert not group.plan().stopping
    hub.call(hub.hub.live.stop(group.job, grace_s=30))
    assert registered(group.members[0]).stopping
    for peer in group.members:
        peer.request(Finished(True))
    until(lambda: job_of(hub, group.job).state == "stopped")
    group.close()


def test_members_that_miss_the_stop_deadline_are_killed(hub: HubServer) -> None:
    assert hub.hub is not None
    group = Running(hub)
    hub.call(hub.hub.live.stop(group.job, grace_s=0.1))
    stops = commands(group.agent, 2)
    assert {s.member for s in stops if isinstance(s, Stop)} == {"w0", "w1"}
    group.close()


def test_stop_ends_though_the_node_says_nothing(tmp_path: Path) -> None:
    with HubServer(options(tmp_path, kill_grace_s=0.1)) as hub:
        assert hub.hub is not None
        with node(hub, "mute"):
            job = submit(hub, nodes=1)
            hub.call(hub.hub.live.stop(job, grace_s=0.0))
            until(lambda: job_of(hub, job).state == "stopped")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux only")
def test_reducer_dies_with_a_hub_that_is_killed() -> None:
    code = (
        "import os, subprocess, sys\n"
        "from atoll.system import die_with_parent\n"
        "child = subprocess.Popen(['sleep', '60'], preexec_fn=die_with_parent())\n"
        "print(child.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=PATIENCE_S)
    until(lambda: not alive(int(done.stdout)))


def alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_member_may_stop_its_own_job_only(hub: HubServer) -> None:
    assert hub.hub is not None
    group = Running(hub)
    token = hub.call(hub.hub.stores.auth.issue_job_token(group.job))
    with Peer(hub, f"{group.job}/control", token=token) as control:
        assert not isinstance(control.request(Stop("other", "", 5.0)), Done)
        assert isinstance(control.request(Stop(group.job, "", 5.0)), Done)
    assert job_of(hub, group.job).stopping
    group.close()


def test_failed_job_is_resumed_under_its_name_and_waits_for_all(hub: HubServer) -> None:
    assert hub.hub is not None
    group = Running(hub)
    error = {"kind": "LossNotFinite", "what": "the loss is not finite"}
    group.members[0].request(Finished(False, error=error))
    until(lambda: job_of(hub, group.job).state == "failed")
    (stop,) = commands(group.agent, 1)
    assert isinstance(stop, Stop)
    assert hub.call(hub.hub.live.resume(group.job)) == group.job
    again = launches(group.agent, 3)
    assert {m: launch.attempt for m, launch in again.items() if m != "reducer"} == {
        "w0": 2,
        "w1": 2,
    }
    peers = [member(hub, again[m], incarnation="second") for m in ("w0", "w1", "reducer")]
    for peer in peers[:2]:
        assert registered(peer).resume_round == -1
    ids = [peer.ask(RoundJoin(0, "base")) for peer in peers[:2]]
    plans = [peer.answer(id) for peer, id in zip(peers, ids, strict=False)]
    assert isinstance(plans[0], RoundPlan)
    assert plans[0].members == ["w0", "w1"]
    for peer in peers:
        peer.close()
    group.close()


def test_resume_of_a_running_job_changes_nothing(hub: HubServer) -> None:
    assert hub.hub is not None
    group = Running(hub)
    assert hub.call(hub.hub.live.resume(group.job)) == group.job
    assert job_of(hub, group.job).members["w0"].attempt == 1
    group.close()


def test_reducer_on_a_node_is_replaced_when_it_is_lost(hub: HubServer) -> None:
    group = Running(hub)
    group.reducer.cut()
    (again,) = launches(group.agent, 1).values()
    assert again.member == "reducer"
    group.close()


def test_hubs_reducer_runs_until_the_job_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "reducer.py"
    marks = tmp_path / "marks"
    script.write_text(
        "import os, pathlib, sys, time\n"
        f"marks = pathlib.Path({str(marks)!r}); marks.mkdir(exist_ok=True)\n"
        "(marks / str(os.getpid())).write_text(os.environ['ATOLL_MEMBER'])\n"
        "print('hello from the reducer', flush=True)\n"
        "sys.exit(3) if len(list(marks.iterdir())) < 2 else time.sleep(60)\n"
    )
    monkeypatch.setattr(reducers_module, "COMMAND", (sys.executable, str(script)))
    monkeypatch.setattr(reducers_module, "FIRST_PAUSE_S", 0.05)
    base = options(tmp_path)
    with (
        HubServer(HubOptions(data=base.data, jobs=base.jobs, reconnect_grace_s=0.3)) as hub,
        node(hub, "a") as agent,
    ):
        job = submit(hub, nodes=2)
        assert set(launches(agent, 2)) == {"w0", "w1"}
        until(lambda: marks.exists() and len(list(marks.iterdir())) == 2)
        assert hub.hub is not None
        logs = hub.hub.stores.logs
        until(lambda: len(hub.call(logs.read(job, member="reducer"))) >= 2)
        hub.call(hub.hub.live.stop(job, grace_s=0.0))
        pids = [int(path.name) for path in marks.iterdir()]
        for item in commands(agent, 2):
            agent.request(ProcessState(job, item.member, ProcessPhase.EXITED, exit_code=75))
        until(lambda: job_of(hub, job).state == "stopped")
        until(lambda: not any(alive(pid) for pid in pids))


def test_a_launch_of_a_deleted_job_holds_up_no_other(hub: HubServer) -> None:
    assert hub.hub is not None
    launching = hub.hub.scheduler._launching
    launching._unsent.add(("a-deleted-job", "w0"))
    with node(hub, "a") as agent:
        submit(hub, nodes=1)
        assert set(launches(agent, 1)) == {"w0"}
    assert not launching._unsent
