"""Members that come, go, freeze and take over the state, at a real hub over real sockets."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from atoll.errors import LeftBehind
from atoll.hub.server import HubServer
from atoll.wire.messages import (
    Beat,
    Done,
    Drain,
    Failure,
    Finished,
    Launch,
    Lease,
    Leaving,
    ProcessState,
    Recover,
    Register,
    Registered,
    RoundJoin,
    RoundPlan,
    RoundVote,
    Source,
    Sources,
    Standing,
    Stop,
    Verdict,
)
from tests.hub.peer import Peer, member, node, submit
from tests.hub.test_membership import (
    Running,
    commands,
    job_of,
    launches,
    options,
    registered,
    told,
    until,
    vote,
)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer(options(tmp_path)) as server:
        yield server


@pytest.fixture
def running(hub: HubServer) -> Iterator[Running]:
    group = Running(hub)
    yield group
    group.close()


def commit(group: Running, round_: int, *, leases: bool = False) -> Verdict:
    """Run one round with all members of a group."""
    joins = []
    for slot, peer in enumerate(group.members):
        lease = Lease(slot, {"data_pass": 0, "offset": 10 * (round_ + 1)}) if leases else None
        joins.append(peer.ask(RoundJoin(round_, f"base{round_}", lease=lease)))
    plans = [peer.answer(id) for peer, id in zip(group.members, joins, strict=True)]
    plan = plans[0]
    assert isinstance(plan, RoundPlan), plan
    ids = [peer.ask(vote(plan)) for peer in group.members]
    verdicts = [peer.answer(id) for peer, id in zip(group.members, ids, strict=True)]
    assert isinstance(verdicts[0], Verdict)
    assert verdicts[0].committed
    return verdicts[0]


def die(group: Running, name: str, *, code: int = -9, attempt: int = 1) -> Launch:
    """Report the end of a member's process; return the launch that replaces it."""
    report = ProcessState(group.job, name, "exited", exit_code=code, attempt=attempt)
    assert isinstance(group.agent.request(report), Done)
    return launches(group.agent, 1)[name]


def ask_sources(peer: Peer, *failed: str) -> Sources:
    answer = peer.request(Recover(list(failed)))
    assert isinstance(answer, Sources), answer
    return answer


def stand(peer: Peer, round_: int, base: str) -> None:
    answer = peer.request(Standing(round_, base, ["w0"], 0.5, 1_000_000))
    assert isinstance(answer, Done), answer


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
    (text,) = told(running.hub, running.job, "recovered")
    assert text == "w1 took over round 1 from w0: 1.0 MB in 0.5 s"


def test_fresh_start_needs_no_state(running: Running) -> None:
    answer = registered(running.members[0])
    assert (answer.recover, answer.lease) == (False, None)


def test_sources_that_failed_are_named_again_when_nobody_else_has_the_state(hub: HubServer) -> None:
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
        asked = newcomer.ask(Recover())
        with pytest.raises(TimeoutError):
            newcomer.answer(asked, timeout_s=0.3)
        assert isinstance(running.members[0].request(vote(plan)), Verdict)
        sources = newcomer.answer(asked)
        assert isinstance(sources, Sources)
        assert sources.round == 2


def test_newcomer_that_fetches_ahead_holds_up_nobody(running: Running) -> None:
    commit(running, 0)
    with member(running.hub, die(running, "w1"), incarnation="new") as newcomer:
        registered(newcomer)
        answer = newcomer.request(Recover(ready=False))
        assert isinstance(answer, Sources)
        assert [peer.member for peer in answer.peers] == ["w0"]
        plan = running.members[0].request(RoundJoin(1, "base1"), timeout_s=2.0)
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
    spec = job_of(hub, job).spec.replace("nodes = 2\n", "nodes = 1\n", 1)
    hub.call(hub.hub.live.resume(job, spec=spec))
    assert launches(running.agent, 1)["w0"].attempt == 2
    record = job_of(hub, job)
    assert (record.state, record.nodes_wanted, record.leases) == ("running", 1, {})
    assert record.members["w1"].state == "stopped"
    with member(hub, launches_of(hub, job), incarnation="new") as w0:
        assert registered(w0).num_slots == 1
        w0.request(Finished(True))
        until(lambda: job_of(hub, job).state == "done")


def launches_of(hub: HubServer, job: str) -> Launch:
    """Return a launch of the only member with a token of its present attempt."""
    assert hub.hub is not None
    token = hub.call(hub.hub.stores.auth.issue_job_token(job, member="w0", attempt=2))
    return Launch(job, "w0", 0, token, "", attempt=2)


def test_standing_on_another_state_is_refused_and_told(running: Running) -> None:
    commit(running, 0)
    launch = die(running, "w1")
    running.members[0].ask(RoundJoin(1, "base1"))
    with member(running.hub, launch, incarnation="new") as newcomer:
        registered(newcomer)
        ask_sources(newcomer)
        answer = newcomer.request(Standing(1, "other"))
        assert isinstance(answer, Failure)
        assert answer.error["kind"] == LeftBehind.__name__
        answer = newcomer.request(Standing(0, "base0"))
        assert isinstance(answer, Failure)
        assert "your replica differs" in told(running.hub, running.job, "refused")[0]
        stand(newcomer, 1, "base1")


def test_run_is_set_back_when_nobody_has_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HubServer(options(tmp_path)) as hub:
        group = Running(hub)
        commit(group, 0, leases=True)
        for name in ("w0", "w1"):
            report = ProcessState(group.job, name, "exited", exit_code=-9, attempt=1)
            group.agent.request(report)
        again = launches(group.agent, 2)
        peers = [member(hub, again[name], incarnation="new") for name in ("w0", "w1")]
        for peer in peers:
            assert registered(peer).recover
        for peer in peers:
            sources = ask_sources(peer)
            assert (sources.round, sources.peers, sources.checkpoint_round) == (0, [], -1)
            assert (sources.pace, sources.lease) == (1.0, None)
        assert "goes back to round 0" in told(hub, group.job, "alarm:rewound")[0]
        assert len(told(hub, group.job, "alarm:rewound")) == 1
        for peer in (*peers, group.agent, group.reducer):
            peer.cut()
    with HubServer(options(tmp_path)) as later:
        record = job_of(later, group.job)
        assert (record.committed_round, record.leases) == (0, {})


def test_lost_member_that_may_live_is_waited_for_before_the_run_is_set_back(
    running: Running,
) -> None:
    commit(running, 0)
    launch = die(running, "w1")
    running.members[0].cut()
    until(lambda: job_of(running.hub, running.job).members["w0"].state == "lost")
    with member(running.hub, launch, incarnation="new") as newcomer:
        registered(newcomer)
        asked = newcomer.ask(Recover())
        with pytest.raises(TimeoutError):
            newcomer.answer(asked, timeout_s=0.5)
        running.members[0] = member(running.hub, running.launches[0])
        sources = newcomer.answer(asked)
        assert isinstance(sources, Sources)
        assert (sources.round, [peer.member for peer in sources.peers]) == (1, ["w0"])
    assert not told(running.hub, running.job, "alarm:rewound")


def test_member_that_leaves_is_waited_for_by_nobody_and_replaced(running: Running) -> None:
    commit(running, 0)
    joined = running.members[1].ask(RoundJoin(1, "base1"))
    assert isinstance(running.members[1].request(Leaving("preempted")), Done)
    answer = running.members[1].answer(joined)
    assert isinstance(answer, Failure)
    again = running.members[1].request(RoundJoin(1, "base1"))
    assert isinstance(again, Failure)
    assert "is leaving" in again.error["what"]
    plan = running.members[0].request(RoundJoin(1, "base1"), timeout_s=2.0)
    assert isinstance(plan, RoundPlan)
    assert plan.members == ["w0"]
    report = ProcessState(running.job, "w1", "exited", exit_code=75, attempt=1)
    running.agent.request(report)
    until(lambda: bool(told(running.hub, running.job, "member-left")))
    assert launches(running.agent, 1)["w1"].attempt == 2
    assert told(running.hub, running.job, "member-leaving") == ["w1 leaves: preempted"]
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
        late = ProcessState(running.job, "w1", "exited", exit_code=1, attempt=1)
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


def test_silent_member_is_not_waited_for_and_heals(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(running, 0)
    monkeypatch.setattr("atoll.hub.rounds.SILENT_S", 0.5)
    joined = running.members[0].ask(RoundJoin(1, "base1"))
    plan = running.members[0].answer(joined)
    assert isinstance(plan, RoundPlan)
    assert plan.members == ["w0"]
    assert told(running.hub, running.job, "member-silent") == [
        "w1 is silent: round 1 goes on without it"
    ]
    running.members[0].request(vote(plan))
    monkeypatch.undo()
    late = running.members[1].request(RoundJoin(1, "base1"))
    assert isinstance(late, Failure)
    assert late.error["kind"] == LeftBehind.__name__
    assert [peer.member for peer in ask_sources(running.members[1]).peers] == ["w0"]
    stand(running.members[1], 2, "base2")
    commit(running, 2)


def test_member_that_beats_is_not_silent(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(running, 0)
    monkeypatch.setattr("atoll.hub.rounds.SILENT_S", 1.0)
    joined = running.members[0].ask(RoundJoin(1, "base1"))
    for _ in range(6):
        running.members[1].tell(Beat())
        time.sleep(0.2)
    assert not told(running.hub, running.job, "member-silent")
    assert isinstance(running.members[1].request(RoundJoin(1, "base1")), RoundPlan)
    assert isinstance(running.members[0].answer(joined), RoundPlan)


def test_below_the_least_number_the_run_pauses_and_goes_on_by_itself(hub: HubServer) -> None:
    assert hub.hub is not None
    group = Running(hub, least=2)
    commit(group, 0)
    launch = die(group, "w1")
    joined = group.members[0].ask(RoundJoin(1, "base1"))
    until(lambda: told(hub, group.job, "paused") == ["paused: 1 of at least 2 members"])
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
    assert len(told(hub, group.job, "unpaused")) == 1
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
    monkeypatch.setattr("atoll.hub.relaunch.FIRST_PAUSE_S", 0.0)
    with node(hub, "a", slots=1) as agent:
        job = submit(hub, nodes=1)
        for attempt in range(1, 9):
            assert launches(agent, 1)["w0"].attempt == attempt
            agent.request(ProcessState(job, "w0", "exited", exit_code=1, attempt=attempt))
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
    running.members[0].request(Finished(True))
    running.agent.request(ProcessState(running.job, "w1", "exited", exit_code=-9, attempt=1))
    until(lambda: job_of(running.hub, running.job).state == "done")
    assert job_of(running.hub, running.job).members["w1"].attempt == 1


def test_leases_are_dealt_with_the_verdict_and_survive_the_hub(tmp_path: Path) -> None:
    with HubServer(options(tmp_path)) as hub:
        group = Running(hub)
        verdict = commit(group, 0, leases=True)
        expected = {m: Lease(s, {"data_pass": 0, "offset": 10}) for s, m in enumerate(("w0", "w1"))}
        assert verdict.leases == expected
        measures = job_of(hub, group.job).measures
        assert measures.duration_s.keys() == {"relay"}
        for peer in (*group.members, group.reducer, group.agent):
            peer.cut()
    with HubServer(options(tmp_path)) as again:
        assert again.hub is not None
        machine = again.hub.rounds.machine(group.job)
        assert machine.progress.leases.cursors == {
            0: {"data_pass": 0, "offset": 10}, 1: {"data_pass": 0, "offset": 10},
        }  # fmt: skip
        assert machine.progress.leases.held == {"w0": 0, "w1": 1}
        assert machine.progress.measures == measures
        assert machine.roll.recorded == {"w0", "w1"}


def test_join_with_the_data_of_another_is_refused(running: Running) -> None:
    commit(running, 0, leases=True)
    stolen = Lease(0, {"data_pass": 0, "offset": 20})
    answer = running.members[1].request(RoundJoin(1, "base1", lease=stolen))
    assert isinstance(answer, Failure)
    assert answer.error["kind"] == LeftBehind.__name__
    assert "not its own" in told(running.hub, running.job, "refused")[0]


def test_forged_verdict_of_a_member_closes_its_connection_and_is_told(running: Running) -> None:
    commit(running, 0)
    plan = RoundPlan(running.job, 1, 99, ["w1"], "alone")
    for forged in (Verdict(1, 2, True, "forged"), plan):
        with pytest.raises(ConnectionClosed):
            running.members[1].request(forged)
        running.members[1].close()
        running.members[1] = member(running.hub, running.launches[1])
    until(lambda: bool(told(running.hub, running.job, "refused")))
    assert "takes no such message" in told(running.hub, running.job, "refused")[0]
    commit(running, 1)


def test_round_is_adopted_from_the_members_after_an_older_file_was_restored(tmp_path: Path) -> None:
    with HubServer(options(tmp_path)) as hub:
        group = Running(hub)
        commit(group, 0)
        for peer in (*group.members, group.reducer, group.agent):
            peer.cut()
    shutil.copytree(tmp_path / "data", tmp_path / "old")

    def peers_of(server: HubServer) -> list[Peer]:
        return [member(server, launch) for launch in group.launches]

    with HubServer(options(tmp_path)) as hub:
        group.members = peers_of(hub)
        reducer = member(hub, group.reducer_launch)
        commit(group, 1)
        commit(group, 2)
        for peer in (*group.members, reducer):
            peer.cut()
    shutil.rmtree(tmp_path / "data")
    shutil.copytree(tmp_path / "old", tmp_path / "data")
    with HubServer(options(tmp_path)) as hub:
        assert job_of(hub, group.job).committed_round == 1
        group.members = peers_of(hub)
        reducer = member(hub, group.reducer_launch)
        verdict = commit(group, 3)
        assert (verdict.round, verdict.epoch > 1_000_000) == (3, True)
        assert job_of(hub, group.job).committed_round == 4
        assert "it is taken over from them" in told(hub, group.job, "alarm:adopted")[0]
        for peer in (*group.members, reducer):
            peer.cut()


def test_member_that_is_alone_ahead_is_refused(running: Running) -> None:
    commit(running, 0)
    answer = running.members[1].request(RoundJoin(7, "base7"))
    assert isinstance(answer, Failure)
    assert answer.error["kind"] == LeftBehind.__name__
    assert "not the next one" in told(running.hub, running.job, "refused")[0]
    commit(running, 1)


def test_reducer_whose_process_exited_is_replaced_at_once(running: Running) -> None:
    report = ProcessState(running.job, "reducer", "exited", exit_code=-9, attempt=1)
    assert isinstance(running.agent.request(report), Done)
    again = launches(running.agent, 1)["reducer"]
    assert again.attempt == 2


def test_vote_against_ends_the_attempt_for_all(running: Running) -> None:
    plan = running.plan()
    answer: Any = running.members[1].request(vote(plan, ok=False))
    assert isinstance(answer, Verdict)
    assert not answer.committed
    assert running.members[0].notice(Verdict) == answer
    assert running.members[0].request(vote(plan)) == answer


def test_vote_that_cannot_be_true_leaves_its_member_out(running: Running) -> None:
    plan = running.plan()
    first = running.members[0].ask(vote(plan))
    forged = RoundVote(plan.round, plan.epoch, True, "digest", ["w0", "w9"])
    assert isinstance(running.members[1].request(forged), Failure)
    verdict = running.members[0].answer(first)
    assert isinstance(verdict, Verdict)
    assert verdict.committed


def test_registering_again_changes_nothing(running: Running) -> None:
    commit(running, 0)
    answer = running.members[1].request(Register(dial=["10.0.0.2:5"]))
    assert isinstance(answer, Registered)
    commit(running, 1)
