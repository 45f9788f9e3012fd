"""What the hub believes of its members: leases, votes and rounds that cannot be true."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from websockets.exceptions import ConnectionClosed

from atoll.errors import LeftBehind
from atoll.hub.server import HubServer
from atoll.wire.frames import HEADER
from atoll.wire.limits import MAX_CONTROL_BYTES
from atoll.wire.messages import (
    Failure,
    Lease,
    Register,
    Registered,
    RoundJoin,
    RoundPlan,
    RoundVote,
    Verdict,
    pack,
)
from tests.hub.meeting import commit
from tests.hub.membership import (
    Running,
    await_returns,
    event_texts,
    job_of,
    options,
    until,
    vote,
)
from tests.hub.peer import Peer, member
from tests.patience import PATIENCE_S


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
        assert machine.commit_log.data_slots.cursors == {
            0: {"data_pass": 0, "offset": 10}, 1: {"data_pass": 0, "offset": 10},
        }  # fmt: skip
        assert machine.commit_log.data_slots.held == {"w0": 0, "w1": 1}
        assert machine.commit_log.timings == measures
        assert machine.members.recorded == {"w0", "w1"}


def test_join_with_the_data_of_another_is_refused(running: Running) -> None:
    commit(running, 0, leases=True)
    stolen = Lease(0, {"data_pass": 0, "offset": 20})
    answer = running.members[1].request(RoundJoin(1, "base1", lease=stolen))
    assert isinstance(answer, Failure)
    assert answer.error["kind"] == LeftBehind.__name__
    until(lambda: "not its own" in "".join(event_texts(running.hub, running.job, "refused")))


def test_a_reason_as_long_as_a_frame_does_not_keep_the_verdict(running: Running) -> None:
    """Behind the member's name it would not fit into one."""
    plan = running.plan()
    against = RoundVote(plan.round, plan.epoch, False, reason="x")
    frame = HEADER.size + MAX_CONTROL_BYTES
    room = frame - len(pack(against, id=1000)) - 3  # a long text has 5 bytes for its length
    request = running.members[0].ask(msgspec.structs.replace(against, reason="x" * room))
    other = running.members[1].request(vote(plan))
    assert isinstance(other, Verdict)
    assert not other.committed
    assert "w0: xxx" in other.reason
    assert isinstance(running.members[0].answer(request), Verdict)


def test_forged_verdict_closes_the_connection(running: Running) -> None:
    commit(running, 0)
    await_returns(running.hub)
    plan = RoundPlan(running.job, 1, 99, ["w1"], "alone")
    for forged in (Verdict(1, 2, True, "forged"), plan):
        with pytest.raises(ConnectionClosed):
            running.members[1].request(forged)
        running.members[1].close()
        running.members[1] = member(running.hub, running.launches[1])
    until(lambda: bool(event_texts(running.hub, running.job, "refused")))
    assert "takes no such message" in event_texts(running.hub, running.job, "refused")[0]
    commit(running, 1)


def test_restored_hub_adopts_its_members_round(tmp_path: Path) -> None:
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
        assert "which is recovered from them" in event_texts(hub, group.job, "alarm:adopted")[0]
        for peer in (*group.members, reducer):
            peer.cut()


def test_member_that_is_alone_ahead_is_refused(running: Running) -> None:
    commit(running, 0)
    answer = running.members[1].request(RoundJoin(7, "base7"))
    assert isinstance(answer, Failure)
    assert answer.error["kind"] == LeftBehind.__name__
    until(lambda: bool(event_texts(running.hub, running.job, "refused")))
    assert "not the next one" in event_texts(running.hub, running.job, "refused")[0]
    commit(running, 1)


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


@pytest.mark.parametrize("busy_s", [math.inf, math.nan, -math.inf])
def test_impossible_times_of_a_member_do_not_keep_the_hub(tmp_path: Path, busy_s: float) -> None:
    """What a hub keeps is JSON, where infinity is null: it would not start again."""
    with HubServer(options(tmp_path, reconnect_grace_s=PATIENCE_S)) as hub:
        group = Running(hub)
        commit(group, 0)
        joins = [
            peer.ask(RoundJoin(1, "base1", steps=1, busy_s=seconds))
            for peer, seconds in zip(group.members, (busy_s, 1.0), strict=True)
        ]
        with pytest.raises(ConnectionClosed):
            group.members[0].answer(joins[0])
        group.members[0].close()
        group.members[0] = member(hub, group.launches[0])
        commit(group, 1)
        for peer in (*group.members, group.reducer, group.agent):
            peer.cut()
    with HubServer(options(tmp_path)) as again:
        assert job_of(again, group.job).committed_round == 2


@pytest.mark.parametrize(
    ("steps", "busy_s"), [(2**62, 1e-300), (1, 1e-300), (1, 1e300), (2**62, 1e300), (-5, -1.0)]
)
def test_absurd_speeds_of_a_member_keep_no_verdict(
    running: Running, steps: int, busy_s: float
) -> None:
    """Nor the hub's housekeeping, which all jobs need: others' shares follow from speeds."""
    commit(running, 0)
    for round_ in (1, 2):
        joins = [
            peer.ask(RoundJoin(round_, f"base{round_}", steps=1, busy_s=1.0))
            for peer in running.members
        ]
        plans = [peer.answer(id) for peer, id in zip(running.members, joins, strict=True)]
        reports = [RoundJoin(round_, f"base{round_}", steps=steps, busy_s=busy_s), None]
        votes = [
            peer.ask(msgspec.structs.replace(vote(cast(RoundPlan, plan)), report=report))
            for peer, plan, report in zip(running.members, plans, reports, strict=True)
        ]
        for peer, id in zip(running.members, votes, strict=True):
            verdict = peer.answer(id)
            assert isinstance(verdict, Verdict)
            assert verdict.committed
            assert all(0 < pace <= 1 for pace in verdict.pace.values())


def test_one_job_that_fails_does_not_keep_the_others(
    running: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert running.hub.hub is not None
    rounds = running.hub.hub.rounds
    machine = rounds.machine(running.job)

    def fails(now: float) -> list[Any]:
        raise OverflowError("what no code expects")

    monkeypatch.setattr(machine, "settle", fails)
    running.hub.call(rounds.tick(), timeout_s=PATIENCE_S)
    assert f"the rounds of {running.job} failed" in caplog.text
    monkeypatch.undo()
    commit(running, 0)
