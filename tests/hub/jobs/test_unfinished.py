"""No job is done while the work of a member is not: by kind of job, role, and bounds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.clock import VirtualClock
from atoll.config import parse_spec
from atoll.hub.jobs import completion
from atoll.hub.jobs.completion import (
    ABSENT_S,
    MAX_FAILURES,
    RestartPolicy,
    covered_by_others,
    missing,
    outcome,
)
from atoll.hub.jobs.jobs import Job, Member
from atoll.hub.scheduler.follower_hosts import missing_followers
from atoll.hub.server import HubServer
from atoll.wire.messages import Done, Drain, Finished, ProcessState, Recover, RoundJoin
from atoll.wire.states import MemberState, ProcessPhase
from tests.hub.membership import (
    event_texts,
    job_of,
    launches,
    options,
    registered,
    until,
)
from tests.hub.peer import Peer, member, node

TRAINER, SCRIPT = "", 'script = "train.py"'
COMMAND, CONTAINER = 'command = ["true"]', 'command = ["true"]\n[launch]\nlauncher = "container"'
IMAGE = '\nimage = "docker.io/x@sha256:' + 64 * "0" + '"'


def job(
    kind: str, *states: str, in_rounds: str = "", least: int = 0, rounds: int = 0, more: str = ""
) -> Job:
    """Return a job whose members `in_rounds` have joined one; `oom` ran out of memory for good."""
    if kind == CONTAINER:
        kind += IMAGE
    text = f"[job]\nnodes = {len(states)}\nmin_nodes = {least}\n{kind}\n{more}"
    members = {}
    for slot, state in enumerate(states):
        name, error = f"w{slot}", {"kind": "OutOfMemory", "what": "no memory"}
        members[name] = Member(
            member=name, slot=slot, node=f"lap{slot}",
            state=MemberState(state.replace("oom", "failed")),
            error=error if state == "oom" else None, retried=99 * (state == "oom"),
            exit_code=-9 if state == "failed" else None, in_rounds=name in in_rounds.split(),
        )  # fmt: skip
    return Job(job="j", created=0.0, spec=parse_spec(text), members=members, committed_round=rounds)


def end_of(record: Job, *absent: str, working: set[str] | None = None) -> str | None:
    end = outcome(record, working=working, absent=absent)
    return None if end is None else ": ".join(filter(None, end[:2]))


@pytest.mark.parametrize(
    ("record", "end", "again"),
    [
        (job(TRAINER, "done", "failed", rounds=3), "done", []),
        (job(TRAINER, "done", "lost", rounds=3, least=1), "done", []),
        (job(TRAINER, "done", "failed"), None, [1]),  # there was no round
        (job(SCRIPT, "done", "failed", in_rounds="w0 w1", rounds=3), "done", []),
        (job(SCRIPT, "done", "failed", "done"), None, [1]),  # servers and workers by queues
        (job(SCRIPT, "done", "lost", "left"), None, [1, 2]),
        # a server beside members that train together
        (job(SCRIPT, "failed", "done", "done", in_rounds="w1 w2", rounds=3), None, [0]),
        (job(SCRIPT, "done", "failed", "running", in_rounds="w1 w2", rounds=3), None, [1]),
        (job(SCRIPT, "done", "failed", "done", in_rounds="w1 w2", rounds=3), "done", []),
        (job(SCRIPT, "oom", "done", in_rounds="w1", rounds=3),
         "done: without lap0, which did not come back", [0]),
        (job(SCRIPT, "oom", "done"), "failed: lap0 ended without finishing", [0]),
        (job(COMMAND, "done", "failed"), None, [1]),
        (job(COMMAND, "done", "done"), "done", []),
        (job(CONTAINER, "done", "failed"), None, [1]),
        (job(CONTAINER, "done", "failed", in_rounds="w0 w1", rounds=3), "done", []),
    ],
)  # fmt: skip
def test_a_killed_member_is_launched_again_unless_finished(
    record: Job, end: str | None, again: list[int]
) -> None:
    assert end_of(record) == end
    assert missing(record) == again


def test_a_running_server_holds_its_job_and_a_newcomer_does_not() -> None:
    record = job(SCRIPT, "running", "done", "running", in_rounds="w1 w2", rounds=3)
    assert end_of(record, working=set()) is None
    record.members["w0"].state = MemberState.DONE
    assert end_of(record, working=set()) == "done"
    assert end_of(record, working={"w2"}) is None


def test_a_member_that_is_killed_every_time_fails_its_job() -> None:
    record = job(SCRIPT, "done", "failed")
    record.members["w1"].failures = MAX_FAILURES - 2
    assert end_of(record) is None
    record.members["w1"].failures += 1
    assert end_of(record) == "failed: lap1 ended without finishing"
    record.stopping = True
    assert end_of(record) == "stopped: stopped by operator"


def test_lost_members_of_a_finished_group_are_named() -> None:
    record = job(TRAINER, "done", "failed", "lost", "stopped", rounds=3)
    text = "lap1, lap2 did not report the end: others have finished its work"
    assert covered_by_others(record) == text
    assert covered_by_others(job(TRAINER, "done", "done", rounds=3)) == ""


def test_an_elastic_job_ends_without_a_machine_that_is_gone() -> None:
    clock = VirtualClock()
    policy = RestartPolicy(clock=clock)
    record = job(SCRIPT, "done", "done", "lost", least=2)
    lost = record.members["w2"]

    def look() -> str | None:
        if not lost.live:  # it has no place
            policy.due("j", lost, node_is_there=False, may_return=False)
        return end_of(record, *policy.absent(record))

    assert look() is None
    clock.advance(ABSENT_S - 1.0)
    assert look() is None
    lost.state = MemberState.RUNNING  # it is back, and lost again
    assert look() is None
    lost.state = MemberState.LOST
    assert look() is None
    clock.advance(ABSENT_S - 1.0)
    assert look() is None
    clock.advance(2.0)
    assert look() == "done: without lap2, which did not come back"
    fixed = job(SCRIPT, "done", "done", "lost")
    assert not policy.absent(fixed)  # all are needed
    assert end_of(fixed) is None
    fewer = job(SCRIPT, "done", "lost", "lost", least=2)
    assert not policy.absent(fewer)


def test_an_island_that_works_for_itself_keeps_its_machines() -> None:
    more = '[strategy]\ninner = "fsdp"\n[island]\nranks = 2\nmachines = 2\nencryption = "off"'
    assert missing_followers(job(SCRIPT, "done", "failed", more=more)) == ["w1.1"]
    trained = job(SCRIPT, "done", "running", more=more, in_rounds="w0 w1", rounds=2)
    assert missing_followers(trained) == []


# ------------------------------------------------------------------------------ on a real hub


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer(options(tmp_path)) as server:
        yield server


def start(hub: HubServer, agent: Peer, *, nodes: int, least: int = 0) -> tuple[str, list[Peer]]:
    """Start a script of that many members; return the job and its members."""
    assert hub.hub is not None
    text = f'[job]\nnodes = {nodes}\nmin_nodes = {least}\nroute = "direct"\nscript = "train.py"\n'
    name = hub.call(hub.hub.stores.jobs.create(text, files={"train.py": ""})).job
    hub.call(hub.hub.live.submit(name))
    launched = launches(agent, nodes)
    peers = [member(hub, launched[f"w{slot}"]) for slot in range(nodes)]
    for peer in peers:
        registered(peer)
    return name, peers


def kill(agent: Peer, name: str, who: str) -> None:
    report = ProcessState(name, who, ProcessPhase.EXITED, exit_code=-9)
    assert isinstance(agent.request(report), Done)


def test_a_killed_server_is_launched_again_after_the_others(hub: HubServer) -> None:
    with node(hub, "box", slots=3) as agent:
        name, peers = start(hub, agent, nodes=3)
        for peer in peers[1:]:
            peer.request(Finished(True))
        kill(agent, name, "w0")
        again = launches(agent, 1)["w0"]
        assert again.attempt == 2
        assert job_of(hub, name).state == "running"
        with member(hub, again, incarnation="i2") as server:
            assert not registered(server).recover
            server.request(Finished(True))
            until(lambda: job_of(hub, name).state == "done")
        for peer in peers:
            peer.close()


@pytest.mark.parametrize("body", [RoundJoin(0, "base"), Recover()])
def test_members_of_rounds_are_not_launched_again(
    hub: HubServer, body: RoundJoin | Recover
) -> None:
    with node(hub, "box", slots=2) as agent:
        name, peers = start(hub, agent, nodes=2)
        for peer in peers:
            peer.ask(body)
        until(lambda: all(m.in_rounds for m in job_of(hub, name).members.values()))
        kill(agent, name, "w1")
        again = launches(agent, 1)["w1"]  # the others are not done yet
        assert job_of(hub, name).members["w1"].in_rounds
        with member(hub, again, incarnation="i2"):
            kill(agent, name, "w1")
            peers[0].request(Finished(True))
            until(lambda: job_of(hub, name).state == "done")
        text = "box (w1) did not report the end: others have finished its work"
        assert event_texts(hub, name, "ended-by-others") == [text]
        for peer in peers:
            peer.close()


def test_an_elastic_job_says_that_it_ended_without_a_machine(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion, "ABSENT_S", 0.5)
    with node(hub, "box", slots=1) as agent:
        laptop = node(hub, "laptop", slots=1)
        assert hub.hub is not None
        text = '[job]\nnodes = 2\nmin_nodes = 1\ncommand = ["true"]\n'
        name = hub.call(hub.hub.stores.jobs.create(text, files={})).job
        hub.call(hub.hub.live.submit(name))
        until(lambda: len(job_of(hub, name).members) == 2)
        where = {m.node: m.member for m in job_of(hub, name).members.values()}
        for agent_, who in ((agent, where["box"]), (laptop, where["laptop"])):
            agent_.request(ProcessState(name, who, ProcessPhase.RUNNING))
        laptop.cut()
        until(lambda: job_of(hub, name).members[where["laptop"]].state == "lost")
        agent.request(Drain(True, "no more work"))
        agent.request(ProcessState(name, where["box"], ProcessPhase.EXITED, exit_code=0))
        until(lambda: job_of(hub, name).state == "done")
        assert job_of(hub, name).reason == "without laptop, which did not come back"
