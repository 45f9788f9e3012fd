"""Members come, take part in rounds, are lost, and are replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.hub.server import HubServer
from atoll.wire.messages import (
    Done,
    Failure,
    Finished,
    Leaving,
    MemberLost,
    ProcessState,
    Recover,
    Register,
    Roster,
    RosterReply,
    RoundJoin,
    RoundPlan,
    RoundVote,
    Standing,
    Stop,
    Verdict,
)
from atoll.wire.messages import Peer as PeerInfo
from atoll.wire.states import ProcessPhase
from tests.hub.membership import (
    Running,
    await_returns,
    commands,
    events_of,
    job_of,
    launches,
    options,
    refusals,
    registered,
    until,
    vote,
)
from tests.hub.peer import NODE, Peer, member, node, submit
from tests.patience import PATIENCE_S, PROMPT_S


def test_job_is_launched_on_its_node_and_members_register(running: Running) -> None:
    record = job_of(running.hub, running.job)
    assert record.state == "running"
    assert {m: r.state for m, r in record.members.items()} == {"w0": "running", "w1": "running"}
    again = registered(running.members[1])
    assert (again.slot, again.num_slots, again.committed_round) == (1, 2, 0)
    assert (again.stopping, again.resume_round) == (False, -1)


def test_roster_tells_where_live_members_can_be_dialled(running: Running) -> None:
    registered(running.members[0], dial=["10.0.0.1:99"])
    reply = running.members[1].request(Roster())
    assert reply == RosterReply([PeerInfo("w0", ["10.0.0.1:99"]), PeerInfo("w1", [])])


def test_round_is_planned_for_the_reducer_first_and_committed(running: Running) -> None:
    plan = running.plan()
    assert (plan.members, plan.route, plan.epoch) == (["w0", "w1"], "relay", 1)
    assert running.reducer.notice(RoundPlan) == plan
    first = running.members[0].ask(vote(plan))
    verdict = running.members[1].request(vote(plan))
    assert verdict == Verdict(0, 1, True, "digest", ["w0", "w1"])
    assert running.members[0].answer(first) == verdict
    assert running.reducer.notice(Verdict) == verdict
    assert running.members[0].request(vote(plan)) == verdict
    assert job_of(running.hub, running.job).committed_round == 1
    late = running.members[0].request(RoundJoin(0, "base"))
    assert isinstance(late, Failure)
    assert late.error["kind"] == "LeftBehind"
    assert "committed round 1" in late.error["expected"]


def test_aborted_round_is_planned_again_under_a_new_epoch(running: Running) -> None:
    plan = running.plan()
    first = running.members[0].ask(vote(plan))
    verdict = running.members[1].request(vote(plan, ok=False))
    assert isinstance(verdict, Verdict)
    assert not verdict.committed
    assert running.members[0].answer(first) == verdict
    assert running.plan().epoch == 2
    assert job_of(running.hub, running.job).aborted_rounds == 1


def test_round_commits_without_a_lost_member(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.hub.jobs.completion.RETURN_S", PATIENCE_S)  # it stays lost
    plan = running.plan()
    running.members[1].cut()
    answer = running.members[0].request(vote(plan))
    assert isinstance(answer, Verdict)
    assert answer.committed
    lost = MemberLost(running.job, plan.epoch, "w1")
    assert running.reducer.notice(MemberLost) == lost
    assert running.members[0].notice(MemberLost) == lost
    assert job_of(running.hub, running.job).members["w1"].state == "lost"


def test_blip_within_the_grace_is_no_death(running: Running) -> None:
    await_returns(running.hub)
    plan = running.plan()
    running.members[1].cut()
    running.members[1] = member(running.hub, running.launches[1])
    first = running.members[0].ask(vote(plan))
    verdict = running.members[1].request(vote(plan))
    assert isinstance(verdict, Verdict)
    assert verdict.committed
    assert running.members[0].answer(first) == verdict
    assert job_of(running.hub, running.job).members["w1"].state == "running"


def test_process_reported_dead_is_lost_at_once(running: Running) -> None:
    plan = running.plan()
    id = running.members[0].ask(vote(plan))
    report = ProcessState(running.job, "w1", ProcessPhase.EXITED, exit_code=-9, tail=["boom"])
    assert isinstance(running.agent.request(report), Done)
    verdict = running.members[0].answer(id)
    assert isinstance(verdict, Verdict)
    assert verdict.committed
    assert job_of(running.hub, running.job).state == "running"
    until(lambda: job_of(running.hub, running.job).members["w1"].attempt == 2)
    kinds = [event["kind"] for event in events_of(running.hub, running.job)]
    assert "member-failed" in kinds


def test_node_cannot_report_on_the_process_of_another(running: Running) -> None:
    with node(running.hub, "stranger") as stranger:
        answer = stranger.request(ProcessState(running.job, "w0", ProcessPhase.EXITED, exit_code=1))
        assert isinstance(answer, Failure)
        assert answer.error["kind"] == "AuthError"


def test_session_that_is_no_member_takes_part_in_nothing(running: Running) -> None:
    assert running.hub.hub is not None
    token = running.hub.call(running.hub.hub.stores.auth.issue_job_token(running.job))
    with Peer(running.hub, f"{running.job}/intruder", token=token) as intruder:
        for body in (
            Register(), RoundJoin(0, "base"), RoundVote(0, 1, True), Recover(),
            Standing(0, "base"), Leaving(),
        ):  # fmt: skip
            answer = intruder.request(body)
            assert isinstance(answer, Failure)
            assert answer.error["kind"] == "AuthError"
            event = f"{type(body).__name__} of intruder is refused"
            until(lambda event=event: event in refusals(running), event)  # type: ignore[misc]
    assert running.plan().members == ["w0", "w1"]


def test_restarted_agent_has_lost_what_was_starting(hub: HubServer) -> None:
    with node(hub, "box") as agent:
        assert hub.hub is not None
        job = submit(hub, nodes=1)
        launch = launches(agent, 1)["w0"]
        agent.request(ProcessState(job, "w0", ProcessPhase.STARTING))
        assert launch.job == job
        with Peer(hub, agent.session, incarnation="i2", info=NODE) as again:
            until(lambda: job_of(hub, job).members["w0"].attempt == 2)
            assert launches(again, 1)["w0"].attempt == 2


def test_reducer_lost_is_told_to_the_members_of_an_open_plan(running: Running) -> None:
    plan = running.plan()
    running.reducer.cut()
    for peer in running.members:
        assert peer.notice(MemberLost) == MemberLost(running.job, plan.epoch, "reducer")


def test_returning_reducer_gets_the_plan_and_lost_members(running: Running) -> None:
    plan = running.plan()
    running.members[1].cut()
    running.members[0].notice(MemberLost)
    with member(running.hub, running.reducer_launch, incarnation="new") as reducer:
        assert reducer.notice(RoundPlan) == plan
        assert reducer.notice(MemberLost).member == "w1"


def test_job_is_done_when_every_member_finished(running: Running) -> None:
    for peer in running.members:
        assert isinstance(peer.request(Finished(True, {"loss": 1.0})), Done)
    until(lambda: job_of(running.hub, running.job).state == "done")
    assert job_of(running.hub, running.job).members["w0"].result == {"loss": 1.0}


def test_job_is_done_when_one_finished_and_the_other_was_lost(running: Running) -> None:
    running.plan()  # they train together
    running.members[0].request(Finished(True))
    running.members[1].cut()
    until(lambda: job_of(running.hub, running.job).state == "done")


def test_job_goes_on_with_new_processes_when_everyone_was_lost(running: Running) -> None:
    for name in ("w0", "w1"):
        report = ProcessState(running.job, name, ProcessPhase.EXITED, exit_code=-9, attempt=1)
        assert isinstance(running.agent.request(report), Done)
    assert set(launches(running.agent, 2)) == {"w0", "w1"}
    assert job_of(running.hub, running.job).state == "running"


def test_error_of_the_job_fails_it_and_stops_the_others(running: Running) -> None:
    error = {"kind": "ScriptError", "what": "train.py raised"}
    running.members[0].request(Finished(False, error=error))
    until(lambda: job_of(running.hub, running.job).state == "failed")
    record = job_of(running.hub, running.job)
    assert record.error == error
    assert record.members["w1"].state == "stopped"
    (stop,) = commands(running.agent, 1)
    assert isinstance(stop, Stop)
    assert stop.member == "w1"


def test_clean_exit_without_last_words_is_done(hub: HubServer) -> None:
    with node(hub, "box") as agent:
        job = submit(hub, nodes=1)
        launches(agent, 1)
        agent.request(ProcessState(job, "w0", ProcessPhase.RUNNING))
        agent.request(ProcessState(job, "w0", ProcessPhase.EXITED, exit_code=0))
        until(lambda: job_of(hub, job).state == "done")


def test_node_that_leaves_takes_its_unconnected_members_along(hub: HubServer) -> None:
    agent = node(hub, "box")
    job = submit(hub, nodes=1)
    launches(agent, 1)
    agent.cut()
    until(lambda: job_of(hub, job).members["w0"].state == "lost")
    assert hub.hub is not None
    (view,) = hub.hub.live.nodes()
    assert view["state"] == "lost"
    with node(hub, "other") as other:
        assert launches(other, 1)["w0"].attempt == 2


def test_live_views_tell_nodes_and_members(running: Running) -> None:
    assert running.hub.hub is not None
    (view,) = running.hub.hub.live.nodes()
    assert view["state"] == "online"
    assert view["running"] == [f"{running.job}/w0", f"{running.job}/w1"]
    members = running.hub.hub.live.members(running.job)
    assert members["w0"]["connected"]
    assert members["w0"]["last_seen_s"] < PROMPT_S
    running.plan()
    assert running.hub.call(running.hub.hub.live.rounds(running.job)) == []


def test_round_in_flight_survives_a_restart_of_the_hub(tmp_path: Path) -> None:
    first = HubServer(options(tmp_path))
    with first:
        group = Running(first)
        plan = group.plan()
        first_vote = group.members[0].ask(vote(plan))
        assert group.members[0].request(Roster()) is not None
        for peer in (*group.members, group.reducer, group.agent):
            peer.cut()
    assert first_vote
    with HubServer(options(tmp_path)) as again:
        peers = [member(again, launch) for launch in group.launches]
        for peer in peers:
            assert registered(peer).committed_round == 0
        assert peers[1].request(RoundJoin(0, "base")) == plan
        ids = [peer.ask(vote(plan)) for peer in peers]
        verdicts = [peer.answer(id) for peer, id in zip(peers, ids, strict=True)]
        assert verdicts[0] == verdicts[1]
        assert isinstance(verdicts[0], Verdict)
        assert verdicts[0].committed
        for peer in peers:
            peer.close()
    with HubServer(options(tmp_path)) as third:
        peers = [member(third, launch) for launch in group.launches]
        for peer in peers:
            assert registered(peer).committed_round == 1
            assert peer.request(vote(plan)) == verdicts[0]
        assert third.hub is not None
        (row,) = third.call(third.hub.live.rounds(group.job))
        assert (row["epoch"], row["committed"]) == (plan.epoch, True)
        for peer in peers:
            peer.close()


def test_members_absent_after_a_restart_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.hub.jobs.completion.LAST_RETURN_S", 1.0)
    monkeypatch.setattr("atoll.hub.scheduler.reducer_hosts.RETURN_S", 1.0)
    with HubServer(options(tmp_path)) as hub:
        group = Running(hub)
        for peer in (*group.members, group.reducer, group.agent):
            peer.cut()
    with HubServer(options(tmp_path, restart_grace_s=0.5)) as again:
        until(lambda: job_of(again, group.job).members["w1"].state == "lost")
        with node(again, "other") as other:
            assert {"w0", "w1", "reducer"} == set(launches(other, 3))
