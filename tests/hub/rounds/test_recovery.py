"""Members that take over the committed state, at a real hub over real sockets."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from atoll.errors import GroupError, LeftBehind
from atoll.hub.server import HubServer
from atoll.wire.messages import (
    Failure,
    Finished,
    ProcessState,
    Recover,
    RoundJoin,
    RoundPlan,
    Source,
    Sources,
    Standing,
    Verdict,
)
from atoll.wire.states import ProcessPhase
from tests.hub.meeting import ask_sources, commit, die, launches_of, stand
from tests.hub.membership import (
    Running,
    commands,
    event_texts,
    job_of,
    launches,
    options,
    registered,
    until,
    vote,
)
from tests.hub.peer import member
from tests.patience import PATIENCE_S


def test_newcomer_takes_over_the_state_and_meets_the_others(running: Running) -> None:
    registered(running.members[0], state=["10.0.0.1:7"])
    commit(running, 0)
    launch = die(running, "w1")
    assert launch.attempt == 2
    with member(running.hub, launch, incarnation="new") as newcomer:
        assert registered(newcomer).recover
        sources = ask_sources(newcomer)
        waiting = running.members[0].ask(RoundJoin(1, "base1"))
        with pytest.raises(TimeoutError):
            running.members[0].answer(waiting, timeout_s=0.5)
        assert (sources.round, sources.peers) == (1, [Source("w0", ["10.0.0.1:7"])])
        stand(newcomer, 1, "base1")
        plan = newcomer.request(RoundJoin(1, "base1"))
        assert isinstance(plan, RoundPlan)
        assert plan.members == ["w0", "w1"]
        assert running.members[0].answer(waiting) == plan
    (text,) = event_texts(running.hub, running.job, "recovered")
    assert text == "box caught up (1.0 MB in 0.5 s)"


def test_late_member_that_catches_up_is_no_fault(running: Running) -> None:
    commit(running, 0)
    late = running.members[1]
    answer = late.request(RoundJoin(0, "base0"))  # once more: it did not get the verdict
    assert isinstance(answer, Failure)
    assert answer.error["kind"] == LeftBehind.__name__
    ask_sources(late)
    stand(late, 1, "base1")
    (text,) = event_texts(running.hub, running.job, "recovered")
    assert text == "box was late; it caught up and rejoined (1.0 MB in 0.5 s)"
    assert event_texts(running.hub, running.job, "refused") == []


def test_fresh_start_needs_no_state(running: Running) -> None:
    answer = registered(running.members[0])
    assert (answer.recover, answer.lease) == (False, None)


def test_failed_donors_are_offered_again_if_alone(hub: HubServer) -> None:
    group = Running(hub, nodes=3)
    commit(group, 0)
    with member(hub, die(group, "w2"), incarnation="new") as newcomer:
        registered(newcomer)
        assert [peer.member for peer in ask_sources(newcomer).peers] == ["w0", "w1"]
        assert [peer.member for peer in ask_sources(newcomer, "w0").peers] == ["w1"]
        assert [peer.member for peer in ask_sources(newcomer, "w0", "w1").peers] == ["w0", "w1"]
    group.close()


def test_recover_during_an_attempt_waits_for_its_verdict(running: Running) -> None:
    commit(running, 0)
    launch = die(running, "w1")
    plan = running.members[0].request(RoundJoin(1, "base1"))
    assert isinstance(plan, RoundPlan)
    with member(running.hub, launch, incarnation="new") as newcomer:
        registered(newcomer)
        request = newcomer.ask(Recover())
        with pytest.raises(TimeoutError):
            newcomer.answer(request, timeout_s=0.3)
        assert isinstance(running.members[0].request(vote(plan)), Verdict)
        sources = newcomer.answer(request)
        assert isinstance(sources, Sources)
        assert sources.round == 2


def test_newcomer_that_fetches_ahead_holds_up_nobody(running: Running) -> None:
    commit(running, 0)
    with member(running.hub, die(running, "w1"), incarnation="new") as newcomer:
        registered(newcomer)
        answer = newcomer.request(Recover(ready=False))
        assert isinstance(answer, Sources)
        assert [peer.member for peer in answer.peers] == ["w0"]
        plan = running.members[0].request(RoundJoin(1, "base1"))
        assert isinstance(plan, RoundPlan)
        assert plan.members == ["w0"]


def test_resumed_job_goes_on_with_other_nodes(running: Running) -> None:
    hub, job = running.hub, running.job
    assert hub.hub is not None
    commit(running, 0, leases=True)
    error = {"kind": "LossNotFinite", "what": "nan"}
    running.members[0].request(Finished(False, error=error))
    until(lambda: job_of(hub, job).state == "failed")
    commands(running.agent, 1)
    spec = job_of(hub, job).text.replace("nodes = 2\n", "nodes = 1\n", 1)
    hub.call(hub.hub.live.resume(job, spec=spec))
    assert launches(running.agent, 1)["w0"].attempt == 2
    record = job_of(hub, job)
    assert (record.state, record.nodes_wanted, record.leases) == ("running", 1, {})
    assert record.members["w1"].state == "stopped"
    with member(hub, launches_of(hub, job), incarnation="new") as w0:
        assert registered(w0).num_slots == 1
        w0.request(Finished(True))
        until(lambda: job_of(hub, job).state == "done")


def test_standing_on_another_state_is_refused_and_told(running: Running) -> None:
    assert running.hub.hub is not None
    rounds = running.hub.hub.rounds
    commit(running, 0)
    launch = die(running, "w1")
    with member(running.hub, launch, incarnation="new") as newcomer:
        registered(newcomer)
        ask_sources(newcomer)
        running.members[0].ask(RoundJoin(1, "base1"))  # it tells what its state is
        until(lambda: "w0" in rounds.machine(running.job).joins)
        answer = newcomer.request(Standing(1, "other"))
        assert isinstance(answer, Failure)
        assert answer.error["kind"] == LeftBehind.__name__
        answer = newcomer.request(Standing(0, "base0"))
        assert isinstance(answer, Failure)
        until(lambda: bool(event_texts(running.hub, running.job, "refused")))
        assert "your replica differs" in event_texts(running.hub, running.job, "refused")[0]
        stand(newcomer, 1, "base1")


def test_run_is_set_back_when_nobody_has_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HubServer(options(tmp_path)) as hub:
        group = Running(hub)
        commit(group, 0, leases=True)
        for name in ("w0", "w1"):
            report = ProcessState(group.job, name, ProcessPhase.EXITED, exit_code=-9, attempt=1)
            group.agent.request(report)
        again = launches(group.agent, 2)
        peers = [member(hub, again[name], incarnation="new") for name in ("w0", "w1")]
        for peer in peers:
            assert registered(peer).recover
        for peer in peers:
            sources = ask_sources(peer)
            assert (sources.round, sources.peers, sources.checkpoint_round) == (0, [], -1)
            assert (sources.pace, sources.lease) == (1.0, None)
        assert "goes back to round 0" in event_texts(hub, group.job, "alarm:rewound")[0]
        assert len(event_texts(hub, group.job, "alarm:rewound")) == 1
        for peer in (*peers, group.agent, group.reducer):
            peer.cut()
    with HubServer(options(tmp_path)) as later:
        record = job_of(later, group.job)
        assert (record.committed_round, record.leases) == (0, {})


def test_run_waits_for_a_lost_member_before_rollback(
    running: Running,
) -> None:
    commit(running, 0)
    launch = die(running, "w1")
    running.members[0].cut()
    until(lambda: job_of(running.hub, running.job).members["w0"].state == "lost")
    with member(running.hub, launch, incarnation="new") as newcomer:
        registered(newcomer)
        request = newcomer.ask(Recover())
        with pytest.raises(TimeoutError):
            newcomer.answer(request, timeout_s=0.5)
        running.members[0] = member(running.hub, running.launches[0])
        sources = newcomer.answer(request)
        assert isinstance(sources, Sources)
        assert (sources.round, [peer.member for peer in sources.peers]) == (1, ["w0"])
    assert not event_texts(running.hub, running.job, "alarm:rewound")


def test_a_join_that_waited_while_the_job_ended_is_answered(running: Running) -> None:
    assert running.hub.hub is not None
    rounds, job = running.hub.hub.rounds, running.job

    async def ends() -> None:
        runtime = rounds.runtime(job)
        async with runtime.lock:
            joining = asyncio.ensure_future(rounds.join(job, "w0", RoundJoin(0, "base0")))
            await asyncio.sleep(0)
            rounds.close(job)
        with pytest.raises(GroupError, match="has ended"):
            await asyncio.wait_for(joining, PATIENCE_S)

    running.hub.call(ends())
