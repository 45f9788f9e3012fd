"""Members that come, leave, freeze and fail, at a real hub over real sockets."""

from __future__ import annotations

import pytest

from atoll.errors import LeftBehind
from atoll.hub.rounds import service
from atoll.hub.server import HubServer
from atoll.wire.messages import (
    Beat,
    Done,
    Drain,
    Failure,
    Finished,
    Leaving,
    ProcessState,
    RoundJoin,
    RoundPlan,
    Stop,
    Verdict,
)
from atoll.wire.states import ProcessPhase
from tests.hub.meeting import ask_sources, commit, die, stand
from tests.hub.membership import (
    Running,
    commands,
    event_texts,
    job_of,
    launches,
    registered,
    until,
    vote,
)
from tests.hub.peer import member, node, submit
from tests.patience import PATIENCE_S


def test_member_that_leaves_is_waited_for_by_nobody_and_replaced(running: Running) -> None:
    commit(running, 0)
    joined = running.members[1].ask(RoundJoin(1, "base1"))
    assert isinstance(running.members[1].request(Leaving("preempted")), Done)
    answer = running.members[1].answer(joined)
    assert isinstance(answer, Failure)
    again = running.members[1].request(RoundJoin(1, "base1"))
    assert isinstance(again, Failure)
    assert "is leaving" in again.error["what"]
    plan = running.members[0].request(RoundJoin(1, "base1"))
    assert isinstance(plan, RoundPlan)
    assert plan.members == ["w0"]
    report = ProcessState(running.job, "w1", ProcessPhase.EXITED, exit_code=75, attempt=1)
    running.agent.request(report)
    until(lambda: bool(event_texts(running.hub, running.job, "member-left")))
    assert launches(running.agent, 1)["w1"].attempt == 2
    assert event_texts(running.hub, running.job, "member-leaving") == [
        "box's worker leaves: preempted"
    ]
    assert job_of(running.hub, running.job).members["w1"].failures == 0


def test_member_of_an_attempt_that_leaves_is_told_as_lost(running: Running) -> None:
    commit(running, 0)
    running.reducer.notices.clear()
    ids = [peer.ask(RoundJoin(1, "base1")) for peer in running.members]
    plan = running.members[0].answer(ids[0])
    assert isinstance(plan, RoundPlan)
    assert isinstance(running.members[1].request(Leaving()), Done)
    verdict = running.members[0].request(vote(plan))
    assert isinstance(verdict, Verdict)
    assert verdict.committed


def test_reports_of_a_replaced_process_change_nothing(running: Running) -> None:
    launch = die(running, "w1")
    with member(running.hub, launch, incarnation="new") as newcomer:
        registered(newcomer)
        late = ProcessState(running.job, "w1", ProcessPhase.EXITED, exit_code=1, attempt=1)
        assert isinstance(running.agent.request(late), Done)
        assert job_of(running.hub, running.job).members["w1"].state == "running"


def test_drained_node_gets_no_new_work(hub: HubServer) -> None:
    assert hub.hub is not None
    with node(hub, "a", slots=2) as a:
        assert isinstance(a.request(Drain(reason="spot notice")), Done)
        job = submit(hub, nodes=1)
        assert job_of(hub, job).state == "waiting"
        (view,) = hub.hub.live.nodes()
        assert view["draining"]
        assert isinstance(a.request(Drain(draining=False)), Done)
        until(lambda: job_of(hub, job).state == "running")


def test_member_of_a_job_cannot_drain(running: Running) -> None:
    assert isinstance(running.members[0].request(Drain()), Failure)


def unheard_for_long(running: Running, slot: int) -> None:
    """Let a member fall silent, and the hub have heard nothing of it for longer than rounds wait.

    The test's members share the machine with the hub: a real wait would let them all seem silent.
    """
    peer = running.members[slot]
    peer.mute()
    assert isinstance(peer.request(Beat()), Done)  # no earlier one is still under way
    assert running.hub.hub is not None
    session = running.hub.hub.sessions.get(peer.session)
    assert session is not None
    session.last_seen -= service.SILENT_S + 1.0


def test_silent_member_is_not_waited_for_and_heals(running: Running) -> None:
    commit(running, 0)
    unheard_for_long(running, 1)
    joined = running.members[0].ask(RoundJoin(1, "base1"))
    plan = running.members[0].answer(joined)
    assert isinstance(plan, RoundPlan)
    assert plan.members == ["w0"]
    assert event_texts(running.hub, running.job, "member-silent") == [
        "w1 is silent: round 1 continues without it"
    ]
    running.members[0].request(vote(plan))
    late = running.members[1].request(RoundJoin(1, "base1"))
    assert isinstance(late, Failure)
    assert late.error["kind"] == LeftBehind.__name__
    assert [peer.member for peer in ask_sources(running.members[1]).peers] == ["w0"]
    stand(running.members[1], 2, "base2")
    commit(running, 2)


def test_member_that_beats_is_not_silent(running: Running) -> None:
    assert running.hub.hub is not None
    rounds = running.hub.hub.rounds
    commit(running, 0)
    unheard_for_long(running, 1)
    assert isinstance(running.members[1].request(Beat()), Done)
    joined = running.members[0].ask(RoundJoin(1, "base1"))
    until(lambda: rounds.waiting(running.job)[0] == ["w1"])
    for _ in range(2):  # one after a pause, e.g. of a busy machine, does not look
        running.hub.call(rounds.tick(), timeout_s=PATIENCE_S)
    assert not event_texts(running.hub, running.job, "member-silent")
    assert isinstance(running.members[1].request(RoundJoin(1, "base1")), RoundPlan)
    assert isinstance(running.members[0].answer(joined), RoundPlan)


def test_run_below_its_minimum_pauses_and_continues(hub: HubServer) -> None:
    assert hub.hub is not None
    group = Running(hub, least=2)
    commit(group, 0)
    launch = die(group, "w1")
    joined = group.members[0].ask(RoundJoin(1, "base1"))
    until(lambda: event_texts(hub, group.job, "paused") == ["paused: 1 of at least 2 members"])
    assert job_of(hub, group.job).paused == "1 of at least 2 members"
    with pytest.raises(TimeoutError):
        group.members[0].answer(joined, timeout_s=0.5)
    with member(hub, launch, incarnation="new") as newcomer:
        registered(newcomer)
        assert ask_sources(newcomer).pace == 0.0
        stand(newcomer, 1, "base1")
        plan = newcomer.request(RoundJoin(1, "base1"))
        assert isinstance(plan, RoundPlan)
        assert plan.members == ["w0", "w1"]
    assert len(event_texts(hub, group.job, "unpaused")) == 1
    assert job_of(hub, group.job).paused == ""
    group.close()


def test_job_starts_with_the_least_number_and_grows(hub: HubServer) -> None:
    with node(hub, "a", slots=2) as a:
        job = submit(hub, nodes=3, least=2, route="direct")
        assert set(launches(a, 2)) == {"w0", "w1"}
        with node(hub, "b", slots=4) as b:
            assert set(launches(b, 1)) == {"w2"}
            assert set(job_of(hub, job).members) == {"w0", "w1", "w2"}


def test_member_that_fails_again_and_again_is_given_up(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.hub.jobs.completion.FIRST_PAUSE_S", 0.0)
    with node(hub, "a", slots=1) as agent:
        job = submit(hub, nodes=1)
        for attempt in range(1, 9):
            assert launches(agent, 1)["w0"].attempt == attempt
            agent.request(
                ProcessState(job, "w0", ProcessPhase.EXITED, exit_code=1, attempt=attempt)
            )
        until(lambda: job_of(hub, job).state == "failed")
        assert job_of(hub, job).reason == "every member was lost"


def test_recovering_member_does_not_keep_a_finished_job_alive(running: Running) -> None:
    commit(running, 0)
    with member(running.hub, die(running, "w1"), incarnation="new") as newcomer:
        registered(newcomer)
        ask_sources(newcomer)
        running.members[0].request(Finished(True, {"loss": 1.0}))
        until(lambda: job_of(running.hub, running.job).state == "done")
    assert job_of(running.hub, running.job).members["w1"].state == "stopped"
    (stop,) = commands(running.agent, 1)
    assert isinstance(stop, Stop)


def test_nobody_is_launched_once_a_member_is_done(running: Running) -> None:
    running.plan()  # they train together
    running.members[0].request(Finished(True))
    running.agent.request(
        ProcessState(running.job, "w1", ProcessPhase.EXITED, exit_code=-9, attempt=1)
    )
    until(lambda: job_of(running.hub, running.job).state == "done")
    assert job_of(running.hub, running.job).members["w1"].attempt == 1


def test_reducer_whose_process_exited_is_replaced_at_once(running: Running) -> None:
    report = ProcessState(running.job, "reducer", ProcessPhase.EXITED, exit_code=-9, attempt=1)
    assert isinstance(running.agent.request(report), Done)
    again = launches(running.agent, 1)["reducer"]
    assert again.attempt == 2
