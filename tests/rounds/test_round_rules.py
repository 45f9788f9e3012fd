"""The rules of a round: every fault in every phase, without sockets."""

from __future__ import annotations

import pytest

from atoll.errors import EpochChanged, GroupError, LeftBehind
from atoll.rounds.checks import majority_base
from atoll.rounds.effects import EventRaised, MemberDropped, Refused
from atoll.rounds.routing import all_reachable
from atoll.wire.messages import RoundJoin, RoundPlan, RoundVote
from tests.rounds.rounds_by_hand import commit_all, join_all, plan_in, rounds_of, verdict_in, vote


def test_plan_waits_for_every_member_and_is_in_slot_order() -> None:
    machine = rounds_of(11)
    for slot in reversed(range(1, 11)):
        assert machine.join(f"w{slot}", RoundJoin(0, "b"), 0.0) == []
    plan = plan_in(machine.join("w0", RoundJoin(0, "b"), 1.0))
    assert plan.members == [f"w{slot}" for slot in range(11)]
    assert (plan.round, plan.epoch, plan.route, plan.reducer) == (0, 1, "relay", "j/reducer")


def test_equal_ok_votes_commit_and_open_the_next_round() -> None:
    machine = rounds_of(2)
    plan = join_all(machine, ["w0", "w1"], 0.0)
    verdict = commit_all(machine, plan, 2.0)
    assert verdict.committed
    assert verdict.digest == "d"
    assert machine.committed_round == 1
    assert join_all(machine, ["w0", "w1"], 3.0).epoch == 2


def test_no_commit_before_the_last_live_vote() -> None:
    machine = rounds_of(3)
    plan = join_all(machine, ["w0", "w1", "w2"], 0.0)
    assert machine.vote("w0", vote(plan), 1.0) == []
    assert machine.vote("w1", vote(plan), 1.0) == []
    assert verdict_in(machine.vote("w2", vote(plan), 1.0)).committed


def test_first_vote_against_aborts_at_once() -> None:
    machine = rounds_of(3)
    plan = join_all(machine, ["w0", "w1", "w2"], 0.0)
    assert not verdict_in(machine.vote("w1", vote(plan, ok=False), 1.0)).committed


def test_member_that_votes_against_twice_holds_up_nobody() -> None:
    machine = rounds_of(3)
    machine.vote("w1", vote(join_all(machine, ["w0", "w1", "w2"], 0.0), ok=False), 1.0)
    plan = join_all(machine, ["w0", "w1", "w2"], 2.0)
    assert machine.vote("w1", vote(plan, ok=False), 3.0) == []
    assert machine.vote("w0", vote(plan), 3.0) == []
    effects = machine.vote("w2", vote(plan), 3.0)
    assert verdict_in(effects).committed
    assert [e.member for e in effects if isinstance(e, EventRaised)] == ["w1"]
    assert join_all(machine, ["w0", "w2"], 4.0).members == ["w0", "w2"]


def test_minority_with_another_result_is_left_out_with_an_alarm() -> None:
    machine = rounds_of(3)
    plan = join_all(machine, ["w0", "w1", "w2"], 0.0)
    machine.vote("w0", vote(plan, "d"), 1.0)
    machine.vote("w1", vote(plan, "e"), 1.0)
    effects = machine.vote("w2", vote(plan, "d"), 1.0)
    assert verdict_in(effects).digest == "d"
    assert any(isinstance(e, EventRaised) and e.alarm and e.member == "w1" for e in effects)


def test_same_digest_of_other_contributors_is_another_result() -> None:
    machine = rounds_of(2)
    plan = join_all(machine, ["w0", "w1"], 0.0)
    machine.vote("w0", vote(plan), 1.0)
    forged = RoundVote(plan.round, plan.epoch, True, "d", ["w0"])
    assert not verdict_in(machine.vote("w1", forged, 1.0)).committed


@pytest.mark.parametrize(("round_", "contributors"), [(7, ["w0"]), (0, ["w0", "w9"])])
def test_impossible_vote_is_refused(round_: int, contributors: list[str]) -> None:
    machine = rounds_of(2)
    plan = join_all(machine, ["w0", "w1"], 0.0)
    machine.vote("w0", vote(plan), 1.0)
    with pytest.raises(GroupError, match="does not belong"):
        machine.vote("w1", RoundVote(round_, plan.epoch, True, "d", contributors), 1.0)
    assert verdict_in(machine.withdraw("w1", 1.0)).committed


def test_bad_vote_aborts_and_retries_under_a_new_epoch() -> None:
    machine = rounds_of(2)
    plan = join_all(machine, ["w0", "w1"], 0.0)
    machine.vote("w0", vote(plan), 1.0)
    verdict = verdict_in(machine.vote("w1", vote(plan, ok=False), 1.0))
    assert not verdict.committed
    assert "w1: why" in verdict.reason
    again = join_all(machine, ["w0", "w1"], 2.0)
    assert (again.round, again.epoch) == (0, 2)
    assert again.timeout_s > plan.timeout_s


def test_different_digests_abort_with_an_alarm() -> None:
    machine = rounds_of(2)
    plan = join_all(machine, ["w0", "w1"], 0.0)
    machine.vote("w0", vote(plan, "d"), 1.0)
    effects = machine.vote("w1", vote(plan, "e"), 1.0)
    assert not verdict_in(effects).committed
    assert any(isinstance(e, EventRaised) and e.alarm for e in effects)


@pytest.mark.parametrize("voted", [False, True])
def test_member_lost_before_the_verdict_is_left_out(*, voted: bool) -> None:
    machine = rounds_of(3)
    plan = join_all(machine, ["w0", "w1", "w2"], 0.0)
    if voted:
        machine.vote("w2", vote(plan, "other"), 0.5)
    machine.vote("w0", vote(plan), 1.0)
    assert machine.gone("w2", 1.0) == [MemberDropped(plan, "w2")]
    assert verdict_in(machine.vote("w1", vote(plan), 1.0)).committed


def test_last_missing_vote_lost_decides_at_once() -> None:
    machine = rounds_of(2)
    plan = join_all(machine, ["w0", "w1"], 0.0)
    machine.vote("w0", vote(plan), 1.0)
    assert verdict_in(machine.gone("w1", 2.0)).committed


def test_everyone_lost_aborts() -> None:
    machine = rounds_of(2)
    join_all(machine, ["w0", "w1"], 0.0)
    machine.gone("w0", 1.0)
    assert not verdict_in(machine.gone("w1", 1.0)).committed


def test_member_lost_before_its_join_is_not_waited_for() -> None:
    machine = rounds_of(3)
    commit_all(machine, join_all(machine, ["w0", "w1", "w2"], 0.0), 1.0)
    machine.join("w0", RoundJoin(1, "b"), 2.0)
    machine.join("w1", RoundJoin(1, "b"), 2.0)
    assert plan_in(machine.gone("w2", 3.0)).members == ["w0", "w1"]


def test_waiting_member_that_is_lost_is_not_planned() -> None:
    machine = rounds_of(3)
    machine.join("w0", RoundJoin(0, "b"), 0.0)
    machine.gone("w0", 1.0)
    assert machine.joins == {}


def test_first_round_waits_for_all_until_the_deadline() -> None:
    machine = rounds_of(2)
    machine.nodes_wanted = 3
    machine.join("w0", RoundJoin(0, "b"), 0.0)
    assert machine.join("w1", RoundJoin(0, "b"), 1.0) == []
    assert machine.settle(119.0) == []
    assert plan_in(machine.settle(120.0)).members == ["w0", "w1"]


def test_late_member_is_left_out_after_the_measured_grace() -> None:
    machine = rounds_of(2)
    machine.join("w0", RoundJoin(0, "b"), 0.0)
    plan = plan_in(machine.join("w1", RoundJoin(0, "b"), 4.0))
    commit_all(machine, plan, 5.0)
    machine.join("w0", RoundJoin(1, "b"), 10.0)
    grace_s = 2 + 3 * 4
    assert machine.settle(10.0 + grace_s - 0.1) == []
    effects = machine.settle(10.0 + grace_s)
    assert plan_in(effects).members == ["w0"]
    assert plan_in(effects).route == "alone"
    assert any(isinstance(e, EventRaised) and e.member == "w1" for e in effects)


def test_member_left_out_is_refused_with_the_committed_round() -> None:
    machine = rounds_of(2)
    commit_all(machine, join_all(machine, ["w0", "w1"], 0.0), 1.0)
    machine.join("w0", RoundJoin(1, "b"), 2.0)
    plan = plan_in(machine.settle(100.0))
    assert machine.join("w1", RoundJoin(1, "b"), 101.0) == []
    effects = machine.vote("w0", vote(plan), 102.0)
    refused = next(e for e in effects if isinstance(e, Refused))
    assert refused.member == "w1"
    assert "committed round 2" in str(refused.error)
    with pytest.raises(LeftBehind, match="committed round 2"):
        machine.join("w1", RoundJoin(0, "b"), 103.0)


def test_member_left_out_takes_part_again_once_it_caught_up() -> None:
    machine = rounds_of(2)
    commit_all(machine, join_all(machine, ["w0", "w1"], 0.0), 1.0)
    machine.join("w0", RoundJoin(1, "b"), 2.0)
    commit_all(machine, plan_in(machine.settle(100.0)), 101.0)
    machine.join("w1", RoundJoin(2, "b"), 102.0)
    assert plan_in(machine.join("w0", RoundJoin(2, "b"), 103.0)).members == ["w0", "w1"]


def test_round_in_the_future_is_an_error() -> None:
    with pytest.raises(GroupError, match="round 3"):
        rounds_of(1).join("w0", RoundJoin(3, "b"), 0.0)


def test_replica_that_differs_from_the_majority_is_left_behind() -> None:
    machine = rounds_of(3)
    machine.join("w0", RoundJoin(0, "odd"), 0.0)
    machine.join("w1", RoundJoin(0, "b"), 0.0)
    effects = machine.join("w2", RoundJoin(0, "b"), 0.0)
    assert plan_in(effects).members == ["w1", "w2"]
    refused = next(e for e in effects if isinstance(e, Refused))
    assert refused.member == "w0"
    assert "your replica differs" in str(refused.error)
    assert any(isinstance(e, EventRaised) and e.alarm for e in effects)


def test_tie_of_bases_goes_to_the_lowest_slot() -> None:
    assert majority_base({"w10": "x", "w2": "y"}) == "y"


def test_joining_again_while_the_plan_is_open_changes_nothing() -> None:
    machine = rounds_of(2)
    plan = join_all(machine, ["w0", "w1"], 0.0)
    assert machine.join("w0", RoundJoin(0, "b"), 1.0) == []
    assert machine.attends("w0")
    assert machine.plan == plan
    assert machine.joins == {}


def test_vote_for_an_epoch_that_is_not_open_is_refused() -> None:
    machine = rounds_of(2)
    plan = join_all(machine, ["w0", "w1"], 0.0)
    with pytest.raises(EpochChanged):
        machine.vote("w0", RoundVote(0, plan.epoch + 1, True), 1.0)
    with pytest.raises(EpochChanged):
        machine.vote("w7", vote(plan), 1.0)


def test_member_that_never_votes_is_left_out_at_the_deadline() -> None:
    machine = rounds_of(2)
    plan = join_all(machine, ["w0", "w1"], 0.0)
    machine.vote("w0", vote(plan), 1.0)
    assert machine.settle(1.5 * plan.timeout_s + 14) == []
    assert verdict_in(machine.settle(1.5 * plan.timeout_s + 15)).committed


def test_time_to_store_a_plan_counts_for_no_member() -> None:
    machine = rounds_of(2)
    commit_all(machine, join_all(machine, ["w0", "w1"], 0.0), 1.0)
    plan = join_all(machine, ["w0", "w1"], 2.0)
    machine.plan_sent(1_000.0)  # its disk was full for a while
    assert machine.settle(1_000.5) == []
    assert verdict_in(machine.settle(1_000.0 + 2 * plan.timeout_s + 60)).committed is False


def test_full_disk_makes_no_period_long_and_no_round_slow() -> None:
    machine = rounds_of(2)
    commit_all(machine, join_all(machine, ["w0", "w1"], 0.0), 1.0)
    plan = join_all(machine, ["w0", "w1"], 2.0)
    machine.plan_sent(1_000.0)
    machine.verdict_sent(commit_all(machine, plan, 1_001.0), 2_000.0)
    commit_all(machine, join_all(machine, ["w0", "w1"], 2_001.0), 2_002.0)
    timings = machine.commit_log.timings
    assert timings.period_s == pytest.approx(2.0)
    assert timings.duration_s["relay"] == pytest.approx(1.0)


def test_lost_members_vote_counts_while_the_attempt_is_open() -> None:
    machine = rounds_of(3)
    plan = join_all(machine, ["w0", "w1", "w2"], 0.0)
    machine.gone("w2", 1.0)
    machine.vote("w2", vote(plan), 2.0)
    machine.vote("w0", vote(plan), 2.0)
    assert verdict_in(machine.vote("w1", vote(plan), 2.0)).committed


def test_relay_plan_waits_for_the_reducer() -> None:
    machine = rounds_of(2)
    machine.reducer_ready = False
    for member in ("w0", "w1"):
        assert machine.join(member, RoundJoin(0, "b"), 0.0) == []
    assert plan_in(machine.reducer(5.0, ready=True)).route == "relay"


def test_one_member_is_alone_and_needs_no_reducer() -> None:
    machine = rounds_of(1)
    machine.reducer_ready = False
    assert join_all(machine, ["w0"], 0.0).route == "alone"


def test_auto_is_direct_only_when_all_reach_all() -> None:
    machine = rounds_of(2, preference="auto")
    machine.join("w0", RoundJoin(0, "b", ["w1"]), 0.0)
    plan = plan_in(machine.join("w1", RoundJoin(0, "b", ["w0"]), 0.0))
    assert (plan.route, plan.store, plan.reducer) == ("direct", "10.0.0.0:1", "")
    machine = rounds_of(2, preference="auto")
    machine.join("w0", RoundJoin(0, "b", ["w1"]), 0.0)
    assert plan_in(machine.join("w1", RoundJoin(0, "b", []), 0.0)).route == "relay"


def test_auto_route_backs_off_to_relay_exponentially() -> None:
    machine = rounds_of(2, preference="auto")
    relayed: list[int] = []
    for attempt in range(24):
        now, round_ = 10.0 * attempt, machine.committed_round
        machine.join("w0", RoundJoin(round_, "b", ["w1"]), now)
        plan = plan_in(machine.join("w1", RoundJoin(round_, "b", ["w0"]), now))
        if plan.route == "direct" and len(relayed) < 3:
            relayed.append(0)
            machine.vote("w0", vote(plan, ok=False), now + 0.1)
            continue
        if plan.route == "relay":
            relayed[-1] += 1
        commit_all(machine, plan, now + 0.1)
    assert relayed == [2, 4, 8]


def test_auto_tries_direct_again_when_a_death_was_the_reason() -> None:
    machine = rounds_of(3, preference="auto")
    everyone = ["w0", "w1", "w2"]
    for member in everyone:
        effects = machine.join(member, RoundJoin(0, "b", everyone), 0.0)
    plan = plan_in(effects)
    machine.vote("w0", vote(plan, ok=False), 1.0)
    machine.join("w0", RoundJoin(0, "b", everyone), 2.0)
    machine.gone("w2", 2.5)
    assert plan_in(machine.join("w1", RoundJoin(0, "b", everyone), 2.0)).route == "direct"


def test_all_reachable_ignores_who_is_not_there() -> None:
    assert all_reachable({"w0": RoundJoin(0, "b", ["w1", "w9"]), "w1": RoundJoin(0, "b", ["w0"])})
    assert not all_reachable({"w0": RoundJoin(0, "b", ["w9"]), "w1": RoundJoin(0, "b", ["w0"])})


def test_stop_is_told_with_the_next_plan() -> None:
    machine = rounds_of(1)
    machine.stopping = True
    assert join_all(machine, ["w0"], 0.0).stopping


def test_timeout_follows_the_routes_measured_duration() -> None:
    machine = rounds_of(1)
    assert join_all(machine, ["w0"], 0.0).timeout_s == 120.0
    commit_all(machine, RoundPlan("j", 0, 1, ["w0"], "alone"), 5.0)
    assert machine.commit_log.timeout_s("alone") == pytest.approx(25.0)
    assert machine.commit_log.timeout_s("relay") == 120.0
    machine.commit_log.timings.duration_s["alone"] = 100.0
    assert machine.commit_log.timeout_s("alone") == 300.0
    machine.commit_log.timings.duration_s["alone"] = 1000.0  # as on a slow line, each time
    assert machine.commit_log.timeout_s("alone") == 2000.0


def test_a_late_member_is_given_fewer_steps_although_refused() -> None:
    machine = rounds_of(2)
    commit_all(machine, join_all(machine, ["w0", "w1"], 0.0), 1.0)
    machine.join("w0", RoundJoin(1, "d", steps=500, busy_s=500.0), 501.0)
    plan = plan_in(machine.settle(501.0 + machine.grace_s() + 1.0))
    assert plan.members == ["w0"]
    commit_all(machine, plan, 520.0)
    with pytest.raises(LeftBehind):
        machine.join("w1", RoundJoin(1, "d", steps=500, busy_s=1000.0), 1001.0)
    machine.recover("w1", 1001.0)
    assert machine.newcomer("w1", 1001.0, whole=True) == 0.5


def test_replaced_process_waits_for_the_next_attempt() -> None:
    machine = rounds_of(2)
    plan = join_all(machine, ["w0", "w1"], 0.0)
    machine.gone("w1", 1.0)
    machine.register("w1", dial=[])
    assert machine.join("w1", RoundJoin(0, "b"), 2.0) == []
    assert not machine.attends("w1")
    effects = machine.vote("w0", vote(plan), 3.0)
    assert verdict_in(effects).committed
    assert any(isinstance(e, Refused) and e.member == "w1" for e in effects)
