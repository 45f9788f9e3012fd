from __future__ import annotations

from atoll.swarm.leases import FIRST_LEASE_S
from atoll.swarm.ledger import HOLD_S, Ledger
from atoll.swarm.places import SwarmSettings
from atoll.wire.swarm import (
    Holder,
    Share,
    SwarmAnnounce,
    SwarmDone,
    SwarmLease,
    SwarmPlace,
    SwarmWant,
    SwarmWatch,
)

JOB = SwarmSettings(2, 3)


def enter(ledger: Ledger, member: str, now: float = 0.0) -> SwarmPlace:
    """A member takes its place, and is ready at once."""
    place = ledger.announce(member, SwarmAnnounce(), now)
    body = SwarmAnnounce(epoch=place.epoch, stage=place.stage, step=ledger.step, restored=True)
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
    for lease in want(ledger, "w2"):
        assert lease.stages == [1]
        done(ledger, lease, "w3")
    assert ledger.counts[1].closing > first


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
    assert ledger._lacking() == {0: [1], 1: [1], 2: [1]}


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


def restarted(old: Ledger, *members: str) -> Ledger:
    return Ledger(old.settings, first_number=1000, expected=members, rebuild_until=20.0)


def told(old: Ledger, member: str, *, folded: list[Share], agreed: bool = False) -> SwarmAnnounce:
    known = old.members[member]
    return SwarmAnnounce(
        epoch=known.holder.epoch, stage=known.stage, step=old.step, folded=folded, agreed=agreed
    )


def test_a_new_ledger_takes_over_what_members_folded() -> None:
    old = ledger_of("w0", "w1")
    first, second, _ = want(old)
    done(old, first, "w0", "w1")
    done(old, second, "w0", "w1")
    new = restarted(old, "w0", "w1")
    both, one = shares(old, "w0"), shares(old, "w1")[:1]
    assert new.announce("w0", told(old, "w0", folded=both), 1.0).keep
    assert want(new) == []
    assert new.announce("w1", told(old, "w1", folded=one), 2.0).keep
    assert holder(new, "w1") == holder(old, "w1")
    assert [(lease.index, lease.stages) for lease in want(new)] == [(1, [1]), (2, [0, 1])]


def test_a_new_ledger_believes_only_one_of_two_claims() -> None:
    old = ledger_of("w0", "w1", "w2", "w3")
    new = restarted(old, "w0", "w1", "w2", "w3")
    assert new.announce("w1", told(old, "w1", folded=[Share(0, 4, "w1")]), 1.0).keep
    place = new.announce("w3", told(old, "w3", folded=[Share(0, 9, "w3")]), 1.0)
    assert (place.keep, place.ready) == (False, True)


def test_with_the_last_mean_only_unfolded_work_is_lost() -> None:
    old = ledger_of("w0", "w1", "w2", "w3")
    new = restarted(old, "w0", "w1", "w2", "w3")
    assert new.announce("w1", told(old, "w1", folded=[Share(0, 4, "w1")]), 1.0).keep
    assert new.announce("w3", told(old, "w3", folded=[], agreed=True), 1.0).keep
    assert 1 not in new._lacking()[0]
    new.lost("w3", 2.0)
    assert new._lacking() == {0: [0], 1: [0, 1], 2: [0, 1]}


def test_a_member_that_fitted_nowhere_gets_a_place_later() -> None:
    ledger = Ledger(SwarmSettings(2, 3, needs_bytes=[5, 5]))
    small = ledger.announce("w0", SwarmAnnounce(free_bytes=4), 0.0)
    assert small.stage == -1
    again = SwarmAnnounce(epoch=small.epoch, free_bytes=6)
    assert ledger.announce("w0", again, 1.0).stage == 0


def test_a_new_ledger_goes_to_the_latest_step() -> None:
    old = ledger_of("w0", "w1", "w2", "w3")
    new = restarted(old, "w0", "w1", "w2", "w3")
    assert new.announce("w2", told(old, "w2", folded=[Share(1, 2, "w2")]), 1.0).keep
    assert new.announce("w0", told(old, "w0", folded=[], agreed=True), 1.0).keep
    later = SwarmAnnounce(epoch=old.members["w1"].holder.epoch, stage=1, step=1)
    assert new.announce("w1", later, 1.0).keep
    assert new.step == 1
    assert set(new.members) == {"w0", "w1"}
    follows = new.news("w0", SwarmWatch(holder(old, "w0").epoch, 0), 1.0)
    behind = new.news("w2", SwarmWatch(holder(old, "w2").epoch, 0), 1.0)
    assert follows is not None
    assert behind is not None
    assert (follows.step, follows.dropped, behind.dropped) == (1, False, True)


def test_members_that_do_not_return_end_the_rebuilding() -> None:
    old = ledger_of("w0", "w1", "w2")
    new = restarted(old, "w0", "w1", "w2")
    for member in ("w0", "w1"):
        new.announce(member, told(old, member, folded=[]), 1.0)
    assert want(new) == []
    new.lost("w2", 2.0)
    assert len(want(new)) == 3
