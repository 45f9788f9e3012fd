"""What the ledger leases and counts of an evaluation."""

from __future__ import annotations

from typing import Any

import msgspec

from atoll.swarm.ledger import Ledger
from atoll.swarm.places import SwarmSettings
from atoll.wire.swarm import HeldOutSum, Share, SwarmAnnounce, SwarmDone, SwarmLease, SwarmWatch
from tests.swarm.test_ledger import close_all, done, holder, ledger_of, want, with_state

JOB = SwarmSettings(2, 3, agrees=False, steps=2, save_every=1)
BETWEEN, END = 2, 4
ONE = HeldOutSum(6.0, 3, 2)


def evaluated_ledger(*members: str, settings: SwarmSettings = JOB) -> Ledger:
    ledger = ledger_of(*members, job=settings)
    for member in members:
        tell(ledger, member)
    return ledger


def tell(ledger: Ledger, member: str) -> None:
    """A member that has its stage announces how many microbatches an evaluation has."""
    known = ledger.members[member]
    body = SwarmAnnounce(
        known.holder.epoch, known.stage, ledger.step, history=ledger.history,
        held_out=[BETWEEN, END],
    )  # fmt: skip
    ledger.announce(member, body, 0.0)


def train(ledger: Ledger, *, evaluate: bool = True) -> list[SwarmLease]:
    """Bring the microbatches of a step through; return what is leased then."""
    for lease in [lease for lease in want(ledger) if lease.stages]:
        report(ledger, lease, "w0", "w1", evaluate=evaluate)
    return want(ledger)


def report(ledger: Ledger, lease: SwarmLease, *path: str, **more: Any) -> None:
    holders = [holder(ledger, member) for member in path]
    body = SwarmDone(lease.step, lease.index, lease.lease, lease.stages, holders)
    ledger.done(msgspec.structs.replace(body, **more), 0.0)


def to_the_end(ledger: Ledger) -> list[SwarmLease]:
    for _ in range(JOB.steps):
        assert train(ledger, evaluate=False) != [] or ledger.step == JOB.steps
    for member in list(ledger.members):
        tell(ledger, member)
    return want(ledger)


def test_a_step_that_is_due_ends_once_all_of_it_is_measured() -> None:
    ledger = evaluated_ledger("w0", "w1")
    leases = train(ledger)
    assert [(lease.index, lease.stages) for lease in leases] == [(3, []), (4, [])]
    report(ledger, leases[0], "w1", held_out=ONE)
    assert (ledger.step, ledger.evaluations.found) == (0, [])
    report(ledger, leases[1], "w1", held_out=HeldOutSum(1.0, 1, 1))
    (found,) = ledger.evaluations.found
    assert (found.step, found.member, found.last) == (0, "w1", False)
    assert found.total == HeldOutSum(7.0, 4, 3)
    assert ledger.step == 1


def test_a_step_that_is_not_due_has_no_evaluation() -> None:
    ledger = evaluated_ledger("w0", "w1")
    leases = train(ledger, evaluate=False)
    assert ledger.step == 1
    assert all(lease.step == 1 and lease.stages for lease in leases)


def test_what_was_measured_twice_counts_once() -> None:
    ledger = evaluated_ledger("w0", "w1")
    first, second = train(ledger)
    for _ in range(2):
        report(ledger, first, "w1", held_out=ONE)
    assert ledger.evaluations.counted == {3: ONE}
    assert want(ledger, holding=(second.lease,)) == []


def test_what_was_measured_outlives_its_members() -> None:
    ledger = evaluated_ledger("w0", "w1", "w2", "w3")
    first, second = train(ledger)
    report(ledger, first, "w1", held_out=ONE)
    ledger.lost("w1", 1.0)
    ledger.lost("w0", 1.0)
    open_ = [lease for lease in want(ledger, "w2") if not lease.stages]
    assert [lease.index for lease in open_] == [second.index]
    assert open_[0].lease != second.lease


def test_a_lease_that_ended_with_its_driver_measures_nothing() -> None:
    ledger = evaluated_ledger("w0", "w1", "w2", "w3")
    first, *_ = train(ledger)
    members = [holder(ledger, "w1")]
    ledger.lost("w0", 1.0)
    late = SwarmDone(first.step, first.index, first.lease, [], members, held_out=ONE)
    ledger.done(late, 1.0)
    assert not ledger.evaluations.counted


def test_the_last_state_is_measured_before_the_job_is_over() -> None:
    ledger = evaluated_ledger("w0", "w1")
    leases = to_the_end(ledger)
    assert [lease.index for lease in leases] == [5, 6, 7, 8]
    ledger.saves.complete(JOB.steps, 0)
    for lease in leases:
        assert not ledger.finished
        report(ledger, lease, "w1", held_out=ONE)
    assert not ledger.finished, "it is not stored yet"
    (found,) = ledger.evaluations.found
    assert found.last
    assert found.total == HeldOutSum(24.0, 12, 8)
    ledger.evaluations.found.clear()
    assert ledger.finished
    news = ledger.news("w0", SwarmWatch(holder(ledger, "w0").epoch, JOB.steps), 0.0)
    assert news is not None
    assert news.finished


def test_a_job_that_is_stopped_ends_without_an_evaluation() -> None:
    ledger = evaluated_ledger("w0", "w1")
    train(ledger, evaluate=False)
    leases = train(ledger, evaluate=False)
    assert leases
    ledger.stop()
    ledger.saves.complete(ledger.step, 0)
    assert ledger.saves.last == ledger.step
    assert ledger.finished
    assert want(ledger) == []


def test_members_that_tell_no_sizes_are_not_waited_for() -> None:
    ledger = ledger_of("w0", "w1")
    for lease in want(ledger):
        report(ledger, lease, "w0", "w1", evaluate=True)
    assert want(ledger) == []
    assert ledger.counts[0].closing


def test_going_back_measures_the_state_anew() -> None:
    ledger = evaluated_ledger("w0", "w1")
    first, _ = train(ledger)
    report(ledger, first, "w1", held_out=ONE)
    ledger.saves.saved = -1
    ledger.go_back(0, 5, 1.0)
    for member in ("w0", "w1"):
        place = ledger.announce(member, SwarmAnnounce(), 1.0)
        with_state(ledger, member, place, 1.0)
    again = train(ledger)
    assert [lease.index for lease in again] == [3, 4]
    assert not ledger.evaluations.counted


def test_a_restarted_hub_learns_that_a_step_is_due() -> None:
    old = evaluated_ledger("w0", "w1")
    train(old)
    ledger = Ledger(JOB, first_number=100, expected=["w0", "w1"], rebuild_until=9.0)
    for member in ("w0", "w1"):
        known = old.members[member]
        stage = old.counts[known.stage]
        folded = [Share(index, lease) for index, lease in enumerate([1, 2, 3])]
        assert len(stage.counted) == len(folded)
        body = SwarmAnnounce(
            known.holder.epoch, known.stage, 0, folded, held_out=[BETWEEN, END], evaluate=True,
            ledger=100,
        )  # fmt: skip
        assert ledger.announce(member, body, 1.0).keep
    assert [(lease.index, lease.stages) for lease in want(ledger)] == [(3, []), (4, [])]


def test_a_step_of_all_stages_waits_for_its_evaluation() -> None:
    settings = SwarmSettings(2, 3, steps=2)
    ledger = evaluated_ledger("w0", "w1", settings=settings)
    leases = train(ledger)
    for stage, member in enumerate(("w0", "w1")):
        ledger.agreed(stage, 0, [member], 0.0)
    assert ledger.step == 0
    for lease in leases:
        report(ledger, lease, "w1", held_out=ONE)
    assert ledger.step == 1
    close_all(ledger, "w0", "w1")
    done(ledger, leases[0], "w1")
