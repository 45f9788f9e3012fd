from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from atoll.clock import VirtualClock
from atoll.codec.registry import make_codec
from atoll.errors import GroupError, GroupLeft, LeftBehind, PeerLost, PeerRefused
from atoll.group.base import Decidable, Group, Reduced, Resting, Work
from atoll.group.in_process.groups import MemoryGroups
from atoll.group.period import PeriodReport
from atoll.group.run_round import STALLED_S, CommittedMean, mean_exchange, run_round
from atoll.group.single import SingleGroup
from atoll.state_lock import StateLock
from atoll.wire.messages import Lease, RoundPlan, Verdict
from tests.patience import PATIENCE_S


class Scripted(SingleGroup):
    """A group whose attempts fail as the script says: (members, error) each."""

    def __init__(self, clock: VirtualClock, script: Sequence[tuple[list[str], float]]) -> None:
        super().__init__()
        self.clock, self.script, self.number = clock, list(script), 0

    def join(self, report: PeriodReport, **options: Any) -> RoundPlan:
        plan = super().join(report)
        if self.number >= len(self.script):
            return plan
        members, took_s = self.script[self.number]
        self.clock.advance(took_s)
        return RoundPlan(job="", round=plan.round, epoch=plan.epoch, members=members, route="relay")

    def reduce(self, *arguments: Any, **options: Any) -> Work[Reduced]:
        self.number += 1
        if self.number <= len(self.script):
            work: Work[Reduced] = Work()
            work.fail(PeerLost("gone again"))
            return work
        return super().reduce(*arguments, **options)


def try_it(
    group: Group,
    clock: VirtualClock,
    *,
    resting: Resting = nullcontext,
    stalled_s: float = STALLED_S,
    **period: Any,
) -> CommittedMean:
    mean = mean_exchange(
        group, [torch.ones(2)], codec=make_codec("fp32"), weight=1.0, resting=resting
    )
    report = PeriodReport(group.committed_round, "b", **period)
    return run_round(group, mean, report, resting=resting, stalled_s=stalled_s, clock=clock)


def test_members_that_come_and_go_are_no_reason_to_give_up() -> None:
    clock = VirtualClock()
    group = Scripted(clock, [([f"w{i}", "w9"], 200.0) for i in range(30)])
    assert try_it(group, clock).attempts == 31


def test_members_that_stay_and_never_agree_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.group.run_round.LONGEST_PAUSE_S", 0.0)
    clock = VirtualClock()
    group = Scripted(clock, [(["w0", "w1"], 30.0)] * 40)
    with pytest.raises(GroupError, match="gone again") as caught:
        try_it(group, clock, stalled_s=300.0)
    assert "the same 2 members" in str(caught.value)
    assert group.number == 11
    quick = Scripted(clock, [(["w0", "w1"], 0.1)] * 40)
    assert try_it(quick, clock, stalled_s=300.0).attempts == 41


def test_every_wait_rests_and_nothing_else() -> None:
    """The state may be read while the member waits, and the codec settles outside of that."""
    state_lock, inside = StateLock(), threading.local()
    seen: list[str] = []

    class Noting(SingleGroup):
        def _note(self, what: str) -> None:
            seen.append(f"{what} {'resting' if getattr(inside, 'rests', False) else 'moving'}")

        def join(self, report: PeriodReport, **options: Any) -> RoundPlan:
            self._note("join")
            return super().join(report)

        def reduce(self, *arguments: Any, **options: Any) -> Work[Reduced]:
            self._note("reduce")
            return super().reduce(*arguments, **options)

        def commit(self, reduced: Decidable | None, **options: Any) -> Verdict:
            self._note("commit")
            assert options["resting"] is resting
            return super().commit(reduced, **options)

    @contextmanager
    def resting() -> Iterator[None]:
        with state_lock.resting():
            inside.rests = True
            try:
                yield
            finally:
                inside.rests = False

    with state_lock.moving():
        try_it(Noting(), VirtualClock(), resting=resting)
    assert seen == ["join resting", "reduce moving", "commit moving"]


def test_donor_reads_state_while_its_member_waits() -> None:
    groups = MemoryGroups(2, timeout_s=PATIENCE_S)
    state_lock, read = StateLock(), threading.Event()

    def waiting() -> CommittedMean:
        with state_lock.moving():
            return run_round(
                groups[0],
                mean_exchange(
                    groups[0],
                    [torch.ones(2)],
                    codec=make_codec("fp32"),
                    weight=1.0,
                    resting=state_lock.resting,
                ),
                PeriodReport(0, "b"),
                resting=state_lock.resting,
            )

    work = Work.start(waiting, name="waits")
    while "w0" not in groups.coordinator.machine.joins:
        threading.Event().wait(0.002)
    with state_lock.still(timeout_s=PATIENCE_S):
        read.set()
    assert not work.done()
    try_it(groups[1], VirtualClock())
    assert work.wait(PATIENCE_S).verdict.committed


def test_lease_travels_and_comes_back() -> None:
    groups = MemoryGroups(2, timeout_s=PATIENCE_S)

    def member(group: Group) -> CommittedMean:
        slot = int(group.me[1:])
        return try_it(group, VirtualClock(), steps=5, busy_s=2.0, lease=Lease(slot, {"offset": 4}))

    assert [agreed.lease for agreed in groups.together(member)] == [
        Lease(0, {"offset": 4}),
        Lease(1, {"offset": 4}),
    ]


@pytest.mark.parametrize(
    ("trouble", "expected"),
    [
        (GroupError("your codec is another"), "your codec is another"),
        (PeerRefused("garbage"), "the others went on"),
        (PeerLost("gone"), "the others went on"),
    ],
)
def test_reason_that_will_not_go_away_is_told_and_others_heal(
    trouble: GroupError, expected: str
) -> None:
    class Behind(SingleGroup):
        def reduce(self, *arguments: Any, **options: Any) -> Work[Reduced]:
            work: Work[Reduced] = Work()
            work.fail(trouble)
            return work

        def commit(self, reduced: Decidable | None, **options: Any) -> Verdict:
            raise LeftBehind("the others went on")

    with pytest.raises(GroupError, match=expected):
        try_it(Behind(), VirtualClock())


def test_member_that_has_left_agrees_to_nothing_more() -> None:
    group = SingleGroup()
    group.leave("preempted")
    with pytest.raises(GroupLeft):
        try_it(group, VirtualClock())
