from __future__ import annotations

import pytest

from atoll.swarm.counts import lacking
from atoll.swarm.leases import FIRST_LEASE_S
from atoll.swarm.ledger import HOLD_S, Ledger
from atoll.swarm.places import SwarmSettings
from atoll.wire.swarm import (
    Holder,
    Share,
    SwarmAnnounce,
    SwarmDone,
    SwarmKept,
    SwarmLease,
    SwarmPlace,
    SwarmWant,
    SwarmWatch,
)

JOB = SwarmSettings(2, 3)


def enter(ledger: Ledger, member: str, now: float = 0.0) -> SwarmPlace:
    """A member takes its place, and is ready at once."""
    place = ledger.announce(member, SwarmAnnounce(), now)
    return with_state(ledger, member, place, now)


def with_state(ledger: Ledger, member: str, place: SwarmPlace, now: float = 0.0) -> SwarmPlace:
    """A member has the state of its place."""
    body = SwarmAnnounce(
        epoch=place.epoch, stage=place.stage, step=place.step, history=place.history
    )
    return ledger.announce(member, body, now)


def ledger_of(*members: str, job: SwarmSettings = JOB) -> Ledger:
    ledger = Ledger(job)
    for member in members:
        enter(ledger, member)
    return ledger


def holder(ledger: Ledger, member: str) -> Holder:
    return ledger.members[member].holder


def want(ledger: Ledger, member: str = "w0", *, room: int = 9, now: float = 0.0,
         holding: tuple[int, ...] = ()) -> list[SwarmLease]:  # fmt: skip
    body = SwarmWant(holder(ledger, member).epoch, room, list(holding))
    return ledger.want(member, body, now).leases


def done(ledger: Ledger, lease: SwarmLease, *path: str, now: float = 0.0) -> None:
    holders = [holder(ledger, member) for member in path]
    report = SwarmDone(lease.step, lease.index, lease.lease, lease.stages, holders)
    ledger.done(report, now)


def shares(ledger: Ledger, member: str, *, step: int = 0) -> list[Share]:
    news = ledger.news(member, SwarmWatch(holder(ledger, member).epoch, step), 0.0)
    assert news is not None
    return news.shares


def close_all(ledger: Ledger, *path: str) -> None:
    for lease in want(ledger, path[0]):
        done(ledger, lease, *path)


def test_newcomers_fill_the_stages_evenly() -> None:
    ledger = ledger_of("w0", "w1", "w2", "w3")
    assert [ledger.members[f"w{n}"].stage for n in range(4)] == [0, 1, 0, 1]


def test_nothing_is_leased_while_a_stage_has_no_member() -> None:
    ledger = ledger_of("w0")
    assert want(ledger) == []
    assert "stage 1" in ledger.paused()
    enter(ledger, "w1")
    assert [lease.index for lease in want(ledger)] == [0, 1, 2]
    assert not ledger.paused()


def test_a_microbatch_is_leased_once_and_repeated_to_its_driver() -> None:
    ledger = ledger_of("w0", "w1", "w2")
    first = want(ledger, "w0", room=2)
    assert want(ledger, "w0", room=2) == first
    assert [lease.index for lease in want(ledger, "w2")] == [2]
    assert want(ledger, "w0", holding=tuple(x.lease for x in first)) == []


def test_a_lease_ends_with_its_driver() -> None:
    ledger = ledger_of("w0", "w1", "w2")
    first = want(ledger, "w0")
    ledger.lost("w0", 1.0)
    again = want(ledger, "w2")
    assert [x.index for x in again] == [x.index for x in first]
    assert not {x.lease for x in again} & {x.lease for x in first}


def test_a_late_lease_goes_to_another_driver_once() -> None:
    ledger = ledger_of("w0", "w1", "w2", "w3", "w4")
    want(ledger, "w0")
    late = FIRST_LEASE_S + 1
    assert want(ledger, "w0", now=late) != []  # repeated, because it does not name them
    assert want(ledger, "w2", now=1.0) == []
    assert len(want(ledger, "w2", now=late)) == 3
    assert want(ledger, "w4", now=2 * late) == []


def test_the_first_done_counts_and_repeats_change_nothing() -> None:
    ledger = ledger_of("w0", "w1", "w2", "w3")
    (lease, *_) = want(ledger, "w0")
    done(ledger, lease, "w0", "w1")
    done(ledger, lease, "w0", "w1")
    done(ledger, lease, "w2", "w3")
    for member, counted in {"w0": "w0", "w2": "w0", "w1": "w1", "w3": "w1"}.items():
        assert shares(ledger, member) == [Share(lease.index, lease.lease, counted)]


def test_what_a_lost_member_held_is_leased_for_its_stage_only() -> None:
    ledger = ledger_of("w0", "w1", "w2", "w3")
    first, second, _ = want(ledger, "w0")
    done(ledger, first, "w0", "w1")
    done(ledger, second, "w0", "w3")
    ledger.lost("w1", 1.0)
    (again,) = want(ledger, "w2")
    assert (again.index, again.stages) == (first.index, [1])
    done(ledger, again, "w3")
    assert [share.lease for share in shares(ledger, "w3")] == [
        first.lease, second.lease, again.lease,
    ]  # fmt: skip


def test_a_holder_that_announced_itself_anew_holds_nothing() -> None:
    ledger = ledger_of("w0", "w1", "w2", "w3")
    (lease, *_) = want(ledger, "w0")
    old = holder(ledger, "w1")
    ledger.lost("w1", 1.0)
    back = SwarmAnnounce(epoch=old.epoch, stage=1, step=0, folded=[Share(0, 1)])
    place = ledger.announce("w1", back, 2.0)
    assert place.ready
    assert not place.keep
    report = SwarmDone(0, lease.index, lease.lease, [0, 1], [holder(ledger, "w0"), old])
    ledger.done(report, 3.0)
    assert ledger.counts[0].counted.keys() == {lease.index}
    assert ledger.counts[1].counted == {}


def test_a_stage_closes_when_all_count_and_opens_with_a_loss() -> None:
    ledger = ledger_of("w0", "w1", "w2", "w3")
    close_all(ledger, "w0", "w1")
    first = ledger.counts[1].closing
    assert first > 0
    assert ledger.required(1) == {"w1"}
    ledger.lost("w1", 1.0)
    assert ledger.counts[1].closing == 0
    assert ledger.counts[0].closing > 0
    for lease in (*want(ledger, "w2"), *want(ledger, "w0")):
        assert lease.stages == [1]
        done(ledger, lease, "w3")
    assert ledger.counts[1].closing > first


def test_a_member_that_comes_back_is_not_told_what_it_dropped() -> None:
    ledger = ledger_of("w0", "w1", "w2", "w3")
    close_all(ledger, "w0", "w1")
    ledger.lost("w1", 1.0)
    enter(ledger, "w1", 2.0)
    assert {share.member for share in shares(ledger, "w1")} == {""}
    assert {share.member for share in shares(ledger, "w0")} == {"w0"}


def kept(ledger: Ledger, keeper: str, of: str, *copied: Share, number: int = 1) -> bool:
    body = SwarmKept(
        holder(ledger, keeper).epoch, holder(ledger, of), ledger.step, number, list(copied)
    )
    return ledger.kept(keeper, body)


def test_a_keeper_takes_over_what_its_copy_holds() -> None:
    ledger = ledger_of("w0", "w1", "w2", "w3")
    close_all(ledger, "w0", "w1")
    first, closing = shares(ledger, "w1"), ledger.counts[1].closing
    assert kept(ledger, "w3", "w1", *first[:2], number=7)
    ledger.lost("w1", 1.0)
    assert ledger.required(1) == {"w3"}
    assert shares(ledger, "w3")[3:] == [Share(s.index, s.lease, "w3", 7) for s in first[:2]]
    (lease,) = (*want(ledger, "w0"), *want(ledger, "w2"))
    assert (lease.index, lease.stages) == (first[2].index, [1])
    done(ledger, lease, "w3")
    assert ledger.counts[1].closing > closing


def test_a_whole_copy_closes_the_stage_anew() -> None:
    ledger = ledger_of("w0", "w1", "w2", "w3")
    close_all(ledger, "w0", "w1")
    closing = ledger.counts[1].closing
    assert kept(ledger, "w3", "w1", *shares(ledger, "w1"))
    ledger.lost("w1", 1.0)
    assert ledger.counts[1].closing > closing
    assert ledger.required(1) == {"w3"}


def test_copies_that_do_not_fit_are_not_used() -> None:
    ledger = ledger_of("w0", "w1", "w2", "w3")
    close_all(ledger, "w0", "w1")
    first = shares(ledger, "w1")
    old = SwarmKept(holder(ledger, "w3").epoch, holder(ledger, "w1"), 0, 1, first)
    assert not kept(ledger, "w0", "w1", *first)  # of another stage
    assert not kept(ledger, "w1", "w1", *first)  # its own
    assert kept(ledger, "w3", "w1", number=5)
    assert not kept(ledger, "w3", "w1", *first, number=4)  # an older one, late
    assert kept(
        ledger, "w3", "w1", *first, Share(0, 999, "w1"), number=6
    )  # holds what never counted
    ledger.lost("w1", 1.0)
    assert ledger.required(1) == set()
    assert not ledger.kept("w3", old)  # of a lost member
    enter(ledger, "w1", 2.0)
    assert not ledger.kept("w3", old)  # of its earlier standing


def test_a_copy_is_lost_with_its_keeper() -> None:
    ledger = ledger_of("w0", "w1", "w2", "w3")
    close_all(ledger, "w0", "w1")
    assert kept(ledger, "w3", "w1", *shares(ledger, "w1"))
    ledger.lost("w3", 1.0)
    enter(ledger, "w3", 2.0)
    ledger.lost("w1", 3.0)
    assert ledger.required(1) == set()


def test_the_step_ends_when_every_stage_has_agreed() -> None:
    ledger = ledger_of("w0", "w1", "w2", "w3")
    close_all(ledger, "w0", "w1")
    ledger.agreed(0, 0, ["w0", "w2"], 1.0)
    assert ledger.step == 0
    ledger.agreed(0, 0, ["w0"], 1.0)
    ledger.agreed(1, 0, ["w1", "w3"], 1.0)
    assert ledger.step == 1
    news = ledger.news("w3", SwarmWatch(holder(ledger, "w3").epoch, 0), 1.0)
    assert news is not None
    assert news.step == 1
    assert len(news.shares) == 3


def test_an_agreed_stage_loses_nothing_with_one_of_its_members() -> None:
    ledger = ledger_of("w0", "w1", "w2", "w3")
    close_all(ledger, "w0", "w1")
    ledger.agreed(1, 0, ["w1", "w3"], 1.0)
    ledger.lost("w1", 1.0)
    assert want(ledger, "w2") == []
    ledger.lost("w3", 1.0)  # the mean is lost, too
    assert lacking(ledger.counts, range(3)) == {0: [1], 1: [1], 2: [1]}


def test_a_member_that_came_back_since_does_not_hold_the_mean() -> None:
    ledger = ledger_of("w0", "w1", "w2", "w3")
    close_all(ledger, "w0", "w1")
    closing = ledger.counts[1].closing
    ledger.lost("w3", 1.0)
    body = SwarmAnnounce(stage=1, step=0)
    assert ledger.announce("w3", body, 1.0).ready
    ledger.agreed(1, 0, ["w1", "w3"], 1.0, closing=closing)
    assert {holder.member for holder in ledger.counts[1].agreed_by} == {"w1"}


def test_a_member_that_missed_its_round_recovers_the_state() -> None:
    ledger = ledger_of("w0", "w1", "w2", "w3")
    close_all(ledger, "w0", "w1")
    ledger.agreed(0, 0, ["w0", "w2"], 1.0)
    old = holder(ledger, "w3")
    ledger.agreed(1, 0, ["w1"], 1.0)
    news = ledger.news("w3", SwarmWatch(old.epoch, 0), 1.0)
    assert news is not None
    assert news.dropped
    place = ledger.announce("w3", SwarmAnnounce(epoch=old.epoch, stage=1, step=0), 1.0)
    assert (place.stage, place.ready, place.keep, place.donors) == (1, False, False, ["w1"])


def test_without_rounds_a_step_ends_when_every_stage_is_closed() -> None:
    ledger = ledger_of("w0", "w1", job=SwarmSettings(2, 3, agrees=False))
    close_all(ledger, "w0", "w1")
    assert ledger.step == 1


def test_members_that_leave_a_finished_job_move_nobody() -> None:
    ledger = ledger_of("w0", "w1", "w2", "w3", job=SwarmSettings(2, 3, agrees=False, steps=1))
    close_all(ledger, "w0", "w1")
    assert ledger.step == 1
    ledger.saves.complete(1, ledger.history)
    assert ledger.finished
    for member in ("w0", "w2"):
        ledger.lost(member, 1.0)
        ledger.tick(2.0)
    assert ledger.moved == []
    assert ledger.paused() == ""
    assert {name: known.ready for name, known in ledger.members.items()} == {"w1": True, "w3": True}


def test_a_stage_stays_open_for_a_member_that_recovers() -> None:
    ledger = ledger_of("w0", "w1")
    place = ledger.announce("w2", SwarmAnnounce(), 5.0)
    assert (place.stage, place.ready, place.donors) == (0, False, ["w0"])
    close_all(ledger, "w0", "w1")
    assert [count.closing > 0 for count in ledger.counts] == [False, True]
    ledger.tick(5.0 + HOLD_S)
    assert all(count.closing for count in ledger.counts)


def test_a_member_of_an_agreed_stage_waits_for_the_next_step() -> None:
    ledger = ledger_of("w0", "w1")
    close_all(ledger, "w0", "w1")
    ledger.agreed(0, 0, ["w0"], 1.0)
    place = enter(ledger, "w2", 1.0)
    assert not place.ready
    ledger.agreed(1, 0, ["w1"], 1.0)
    assert ledger.step == 1
    assert enter(ledger, "w2", 2.0).ready


def test_reports_of_other_steps_and_unknown_indices_are_ignored() -> None:
    ledger = ledger_of("w0", "w1")
    path = [holder(ledger, "w0"), holder(ledger, "w1")]
    for step, index in ((1, 0), (-1, 0), (0, 3), (0, -1)):
        ledger.done(SwarmDone(step, index, 7, [0, 1], path), 0.0)
    ledger.done(SwarmDone(0, 0, 7, [0, 1], path[::-1]), 0.0)
    assert all(not count.log for count in ledger.counts)


def test_a_member_that_fitted_nowhere_gets_a_place_later() -> None:
    ledger = Ledger(SwarmSettings(2, 3, needs_bytes=[5, 5]))
    small = ledger.announce("w0", SwarmAnnounce(free_bytes=4), 0.0)
    assert small.stage == -1
    again = SwarmAnnounce(epoch=small.epoch, free_bytes=6)
    assert ledger.announce("w0", again, 1.0).stage == 0


def test_a_step_waits_longer_for_a_member_that_came_too_late() -> None:
    ledger = ledger_of("w0", "w1")
    place = ledger.announce("w2", SwarmAnnounce(), 1.0)
    close_all(ledger, "w0", "w1")
    ledger.tick(1.0 + HOLD_S)
    for stage in range(2):
        ledger.agreed(stage, 0, ["w0", "w1"], 1.0 + HOLD_S)
    assert ledger.step == 1
    late = with_state(ledger, "w2", place, 100.0)
    assert (late.ready, late.step) == (False, 1)
    close_all(ledger, "w0", "w1")
    ledger.tick(100.0 + 1.5 * HOLD_S)
    assert not ledger.counts[late.stage].closing
    assert with_state(ledger, "w2", late, 100.0 + 1.5 * HOLD_S).ready


@pytest.mark.parametrize("row_s", [-1.0, 1e-300, 1e300])
def test_absurd_speeds_change_nothing(row_s: float) -> None:
    ledger = ledger_of("w0", "w1")
    w0 = ledger.members["w0"]
    ledger.announce("w0", SwarmAnnounce(epoch=w0.holder.epoch, row_s=0.5), 0.0)
    ledger.announce("w0", SwarmAnnounce(epoch=w0.holder.epoch, row_s=row_s), 0.0)
    ledger.done(SwarmDone(0, 0, 1, [], [], row_s={"w0": row_s, "w1": row_s}), 0.0)
    assert (w0.row_s, ledger.members["w1"].row_s) == (0.5, 0.0)
