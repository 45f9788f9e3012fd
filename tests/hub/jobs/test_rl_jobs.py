"""Jobs of policies: each member for itself, a critic that no round waits for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.config import parse_spec
from atoll.errors import ConfigError
from atoll.hub.alarms.facts import Facts, JobFacts, MemberFacts
from atoll.hub.alarms.member_rules import stale
from atoll.hub.jobs.completion import (
    STEADY_S,
    RestartPolicy,
    missing,
    reports_directly,
    rl_outcome,
    without_end,
)
from atoll.hub.jobs.jobs import Job, Member
from atoll.hub.rounds.timeline import CatchUp
from atoll.hub.scheduler.scaling import check_bounds
from atoll.hub.security.auth import Identity
from atoll.hub.security.queue_rights import may_use_queue
from atoll.hub.server import HubServer
from atoll.rounds.machine import RoundMachine
from atoll.wire.messages import (
    Done,
    Failure,
    Finished,
    ProcessState,
    Registered,
    RoundJoin,
    Stopping,
)
from atoll.wire.states import MemberState, ProcessPhase
from tests.hub.membership import (
    event_texts,
    job_of,
    launches,
    options,
    registered,
    until,
)
from tests.hub.peer import member, node

FILE = """
[job]
name = "p"
{more}
[rl]
pool = "{pool}"
[[rl.policies]]
name = "light"
env = "CartPole-v1"
[[rl.policies]]
name = "heavy"
env = "CartPole-v1"
{strategy}
"""


def text(*, pool: str = "", strategy: str = "", more: str = "") -> str:
    return FILE.format(pool=pool, strategy=strategy, more=more)


def job(*states: str, pool: str = "", stopping: bool = False) -> Job:
    """Return a job of a critic and two actors in these states; `fatal` failed by a bad file."""
    spec = text(pool=pool)
    members = {}
    for slot, state in enumerate(states):
        error = {"kind": "ConfigError", "what": "no such environment"} if state == "fatal" else None
        name = f"w{slot}"
        members[name] = Member(
            member=name, slot=slot, node="n",
            state=MemberState("failed" if state == "fatal" else state),
            error=error,
        )  # fmt: skip
    return Job(
        job="j", created=0.0, spec=parse_spec(spec), members=members, stopping=stopping,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("states", "stopping", "expected"),
    [
        (("running", "running", "done"), False, None),
        (("done", "done", "done"), False, "done"),
        (("running", "done", "done"), False, None),  # the critic reads what is left
        (("lost", "done", "done"), False, None),  # and is launched again for that
        (("fatal", "done", "done"), False, "failed"),
        (("fatal", "running", "done"), False, None),  # policies go on without it
        (("running", "fatal", "running"), False, None),  # one ends no other
        (("running", "fatal", "done"), False, None),
        (("left", "fatal", "done"), False, "failed"),  # the critic got the request to end
        (("done", "fatal", "fatal"), False, "failed"),
        (("done", "lost", "done"), False, None),
        (("stopped", "done", "lost"), True, "stopped"),
        (("running", "stopped", "stopped"), True, None),
        (("done", "done"), False, None),  # one was never begun
    ],
)
def test_how_a_job_of_policies_ends(
    states: tuple[str, ...], stopping: bool, expected: str | None
) -> None:
    end = rl_outcome(job(*states, stopping=stopping))
    assert (end[0] if end else None) == expected


def test_a_failed_job_says_who_failed_and_why() -> None:
    end = rl_outcome(job("done", "fatal", "fatal"))
    assert end is not None
    assert end[1] == "n (w1): no such environment; also failed: n (w2)"
    assert end[2] == {"kind": "ConfigError", "what": "no such environment"}


@pytest.mark.parametrize(
    ("states", "pool", "expected"),
    [
        (("running", "fatal", "done"), "", True),
        (("running", "fatal", "fatal"), "", True),
        (("running", "done", "done"), "", False),  # it ends by itself
        (("running", "fatal", "running"), "", False),
        (("running", "fatal", "lost"), "", False),  # that one comes again
        (("done", "fatal", "done"), "", False),
        (("running", "fatal", "done"), "pool/x", False),  # other jobs use it
    ],
)
def test_when_a_critic_waits_in_vain(states: tuple[str, ...], pool: str, expected: bool) -> None:
    assert without_end(job(*states, pool=pool)) is expected


def test_started_rl_members_are_relaunched_independently() -> None:
    assert missing(job("lost", "running", "lost")) == [0, 2]
    assert missing(job("lost", "done", "lost")) == [0, 2]
    assert missing(job("running", "done", "done")) == []


def test_with_agreement_only_the_critic_is_stopped() -> None:
    record = job("running", "running", "lost")
    assert reports_directly(record) == ["w0", "w1"]
    record.spec = parse_spec(text(strategy='[strategy]\npreset = "diloco"'))
    assert reports_directly(record) == ["w0"]


def test_failures_count_anew_after_a_minute_of_work() -> None:
    class Now:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

        def wall(self) -> float:
            return self.now

    clock = Now()
    relaunches = RestartPolicy(clock=clock)
    worker = Member(member="w1", slot=1, node="n", state=MemberState.RUNNING, failures=3, attempt=4)
    assert not relaunches.steady("j", worker)
    clock.now = STEADY_S / 2
    assert not relaunches.steady("j", worker)
    clock.now = STEADY_S + 1
    assert relaunches.steady("j", worker)
    worker.state = MemberState.LOST
    assert not relaunches.steady("j", worker)
    worker.state, worker.attempt = MemberState.RUNNING, 5
    assert not relaunches.steady("j", worker)


# ----------------------------------------------------------------------------- rounds


def rounds() -> RoundMachine:
    machine = RoundMachine("j", nodes_wanted=2, aside=frozenset({"w0"}), preference="relay")
    machine.reducer_ready = True
    for name in ("w0", "w1", "w2"):
        machine.expect(name)
        machine.register(name, dial=[])
    return machine


def test_rounds_wait_for_actors_only_whatever_the_critic_does() -> None:
    machine = rounds()
    assert machine.members.awaited() == ["w1", "w2"]
    for happens in (
        lambda: machine.launch("w0"),
        lambda: machine.register("w0", dial=["a:1"]),
        lambda: machine.back("w0"),
        lambda: machine.gone("w0", 0.0),
        lambda: machine.gone("w0", 0.0, lost=False),
        lambda: machine.leave("w0", 0.0),
    ):
        assert not happens()
        assert set(machine.members.states) == {"w1", "w2"}
        assert not machine.members.finished
    machine.join("w1", RoundJoin(0, "base"), 1.0)
    machine.join("w2", RoundJoin(0, "base"), 1.1)
    assert machine.plan is not None
    assert machine.plan.members == ["w1", "w2"]


def test_no_alarm_says_that_the_critic_misses_rounds() -> None:
    def facts(*, aside: bool) -> Facts:
        passed = [
            CatchUp(
                epoch=n,
                round=n,
                route="relay",
                members=["w1"],
                contributors=["w1"],
                time=float(n),
                seconds=0.1,
                nbytes=1,
                rows=[],
            )
            for n in range(1, 8)
        ]
        members = {
            "w0": MemberFacts(member="w0", node="a", state="running", aside=aside),
            "w1": MemberFacts(member="w1", node="b", state="running"),
        }
        return Facts(
            now=9.0, jobs=[JobFacts(job="j", state="running", members=members, rounds=passed)]
        )

    assert [found.member for found in stale(facts(aside=False))] == ["w0"]
    assert not list(stale(facts(aside=True)))


# ------------------------------------------------------------------- pools and bounds


def test_a_pool_is_listed_by_itself_and_covers_what_is_below() -> None:
    spec = parse_spec(text(pool="pool/x"))
    assert spec.job.queues == ["pool/x"]
    assert parse_spec(text(pool="pool/x", more='queues = ["pool/x"]')).job.queues == ["pool/x"]
    mine = Identity(role="job", name="j")
    for queue, may in (
        ("pool/x", True), ("pool/x/experience.j.w1", True), ("pool/xy/experience", False),
        ("pool/y", False), ("j/experience", True), ("node/x/y", False),
    ):  # fmt: skip
        assert may_use_queue(mine, queue, shared=spec.job.queues) is may, queue


@pytest.mark.parametrize("name", ["balance", "node/x", "pool/", "/x", "pool/a b", "pool/.."])
def test_a_pool_needs_a_name_that_jobs_can_share(name: str) -> None:
    with pytest.raises(ConfigError):
        parse_spec(text(pool=name))


def test_policies_cannot_be_scaled() -> None:
    with pytest.raises(ConfigError, match=r"members of an \[rl\] job"):
        check_bounds(job("running", "running", "running"), least=1, most=5)


# ------------------------------------------------------------------- at a real hub


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer(options(tmp_path)) as server:
        yield server


def submit(hub: HubServer, spec: str) -> str:
    assert hub.hub is not None
    name = hub.call(hub.hub.stores.jobs.create(spec, files={})).job
    hub.call(hub.hub.live.submit(name))
    return name


def test_failed_actor_ends_no_one_else(hub: HubServer) -> None:
    with node(hub, "box", slots=3) as agent:
        name = submit(hub, text())
        launched = launches(agent, 3)
        assert set(launched) == {"w0", "w1", "w2"}  # and no reducer
        peers = {m: member(hub, launch) for m, launch in launched.items()}
        for peer in peers.values():
            entered = registered(peer)
            assert isinstance(entered, Registered)
            assert not entered.recover
        bad = {"kind": "ConfigError", "what": "no such environment"}
        assert isinstance(peers["w1"].request(Finished(ok=False, error=bad)), Done)
        until(lambda: event_texts(hub, name, "member-given-up") != [])
        assert job_of(hub, name).state == "running"
        assert isinstance(peers["w2"].request(Finished(ok=True, result={"x": 1})), Done)
        peers["w0"].notice(Stopping)
        assert event_texts(hub, name, "critic-ends") == ["no actor is left: the critic stops"]
        assert job_of(hub, name).state == "running"
        assert isinstance(peers["w0"].request(Finished(ok=True, result={"y": 2})), Done)
        until(lambda: job_of(hub, name).state == "failed")
        assert job_of(hub, name).reason == "box (w1): no such environment"
        assert job_of(hub, name).members["w2"].result == {"x": 1}
        for peer in peers.values():
            peer.close()


def test_a_stop_is_heard_at_once_and_results_come_through(hub: HubServer) -> None:
    assert hub.hub is not None
    with node(hub, "box", slots=3) as agent:
        name = submit(hub, text())
        peers = [member(hub, launch) for _, launch in sorted(launches(agent, 3).items())]
        for peer in peers:
            registered(peer)
        hub.call(hub.hub.live.stop(name, grace_s=30.0))
        for peer in peers:
            assert peer.notice(Stopping).job == name
            assert isinstance(peer.request(Finished(ok=True, result={"stopped": True})), Done)
        until(lambda: job_of(hub, name).state == "stopped")
        assert all(m.result == {"stopped": True} for m in job_of(hub, name).members.values())
        for peer in peers:
            peer.close()


def test_killed_actor_is_relaunched_while_others_continue(hub: HubServer) -> None:
    with node(hub, "box", slots=3) as agent:
        name = submit(hub, text())
        launched = launches(agent, 3)
        with member(hub, launched["w2"]) as other:
            registered(other)
            report = ProcessState(name, "w2", ProcessPhase.STARTING, attempt=1)
            assert isinstance(agent.request(report), Done)
            report = ProcessState(name, "w1", ProcessPhase.EXITED, exit_code=-9, attempt=1)
            assert isinstance(agent.request(report), Done)
            assert launches(agent, 1)["w1"].attempt == 2
            assert isinstance(other.request(Finished(ok=True)), Done)
            report = ProcessState(name, "w0", ProcessPhase.EXITED, exit_code=-9, attempt=1)
            assert isinstance(agent.request(report), Done)
            assert launches(agent, 1)["w0"].attempt == 2  # also after another is done
            assert job_of(hub, name).state == "running"


def test_the_critic_joins_no_rounds(hub: HubServer) -> None:
    with node(hub, "box", slots=3) as agent:
        submit(hub, text(strategy='[strategy]\npreset = "diloco"'))
        launched = launches(agent, 4)
        assert "reducer" in launched  # policies agree
        with member(hub, launched["w0"]) as critic:
            registered(critic)
            answer = critic.request(RoundJoin(0, "base"))
            assert isinstance(answer, Failure)
            assert "takes no part" in answer.error["what"]
