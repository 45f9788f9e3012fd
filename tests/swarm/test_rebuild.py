"""A ledger is rebuilt from its members after a restart of the hub."""

from __future__ import annotations

import msgspec

from atoll.swarm.counts import lacking
from atoll.swarm.ledger import Ledger
from atoll.wire.swarm import Share, SwarmAnnounce, SwarmWatch
from tests.swarm.test_ledger import done, holder, ledger_of, shares, want

NEW = 1000
"""Number of the new ledger, which members know from its first answer."""


def restarted(old: Ledger, *members: str) -> Ledger:
    return Ledger(old.settings, first_number=NEW, expected=members, rebuild_until=20.0)


def announcement(
    old: Ledger, member: str, *, folded: list[Share], agreed: bool = False
) -> SwarmAnnounce:
    known = old.members[member]
    return SwarmAnnounce(
        epoch=known.holder.epoch, stage=known.stage, step=old.step, folded=folded, agreed=agreed,
        ledger=NEW,
    )  # fmt: skip


def test_a_new_ledger_believes_only_what_was_said_to_itself() -> None:
    old = ledger_of("w0", "w1")
    first, _, _ = want(old)
    late = msgspec.structs.replace(announcement(old, "w0", folded=[]), ledger=old.first_number)
    done(old, first, "w0", "w1")
    new = restarted(old, "w0", "w1")
    place = new.announce("w0", late, 1.0)
    assert (place.epoch, place.stage, place.keep) == (late.epoch, -1, True)
    assert (place.ledger, new.members) == (NEW, {})
    assert new.announce("w0", announcement(old, "w0", folded=shares(old, "w0")), 1.0).ready
    assert lacking(new.counts, range(3))[0] == [1]


def test_a_new_ledger_takes_over_what_members_folded() -> None:
    old = ledger_of("w0", "w1")
    first, second, _ = want(old)
    done(old, first, "w0", "w1")
    done(old, second, "w0", "w1")
    new = restarted(old, "w0", "w1")
    both, one = shares(old, "w0"), shares(old, "w1")[:1]
    assert new.announce("w0", announcement(old, "w0", folded=both), 1.0).keep
    assert want(new) == []
    assert new.announce("w1", announcement(old, "w1", folded=one), 2.0).keep
    assert holder(new, "w1") == holder(old, "w1")
    assert [(lease.index, lease.stages) for lease in want(new)] == [(1, [1]), (2, [0, 1])]


def test_a_new_ledger_believes_only_one_of_two_claims() -> None:
    old = ledger_of("w0", "w1", "w2", "w3")
    new = restarted(old, "w0", "w1", "w2", "w3")
    assert new.announce("w1", announcement(old, "w1", folded=[Share(0, 4, "w1")]), 1.0).keep
    place = new.announce("w3", announcement(old, "w3", folded=[Share(0, 9, "w3")]), 1.0)
    assert (place.keep, place.ready) == (False, True)


def test_with_the_last_mean_only_unfolded_work_is_lost() -> None:
    old = ledger_of("w0", "w1", "w2", "w3")
    new = restarted(old, "w0", "w1", "w2", "w3")
    assert new.announce("w1", announcement(old, "w1", folded=[Share(0, 4, "w1")]), 1.0).keep
    assert new.announce("w3", announcement(old, "w3", folded=[], agreed=True), 1.0).keep
    assert 1 not in lacking(new.counts, range(3))[0]
    new.lost("w3", 2.0)
    assert lacking(new.counts, range(3)) == {0: [0], 1: [0, 1], 2: [0, 1]}


def test_a_new_ledger_goes_to_the_latest_step() -> None:
    old = ledger_of("w0", "w1", "w2", "w3")
    new = restarted(old, "w0", "w1", "w2", "w3")
    assert new.announce("w2", announcement(old, "w2", folded=[Share(1, 2, "w2")]), 1.0).keep
    assert new.announce("w0", announcement(old, "w0", folded=[], agreed=True), 1.0).keep
    later = SwarmAnnounce(epoch=old.members["w1"].holder.epoch, stage=1, step=1, ledger=NEW)
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
        new.announce(member, announcement(old, member, folded=[]), 1.0)
    assert want(new) == []
    new.lost("w2", 2.0)
    assert len(want(new)) == 3


def test_a_new_ledger_ends_where_the_old_one_wanted_to() -> None:
    old = ledger_of("w0", "w1", "w2", "w3")
    new = restarted(old, "w0", "w1")
    announced_last = msgspec.structs.replace(announcement(old, "w0", folded=[]), last=5)
    assert new.announce("w0", announced_last, 1.0).keep
    assert (new.saves.last, new.saves.stopping) == (5, True)
