from __future__ import annotations

from random import Random

from atoll.swarm.driver import (
    FIRST_HOP_S,
    Begin,
    Driver,
    Effect,
    Finished,
    ReleaseAt,
    ResumeAt,
)
from atoll.wire.swarm import Broken, Handed, Holder, Share, SwarmLease, SwarmPeer, Work

ME = Holder("me", 1)


def table(*stages: str) -> list[SwarmPeer]:
    """Return the peers of stages 0, 1, ..., each a text of one-letter names."""
    return [SwarmPeer("me", 1, 0)] + [
        SwarmPeer(name, 1, stage) for stage, names in enumerate(stages, 1) for name in names
    ]


def driver(*stages: str) -> Driver:
    made = Driver(ME, stages=len(stages) + 1, rows=2, random=Random(0))
    made.peers(table(*stages), 0.0)
    return made


def lease(number: int = 7, *, index: int = 0, stages: tuple[int, ...] = (0, 1, 2)) -> SwarmLease:
    return SwarmLease(3, index, number, list(stages))


def begun(made: Driver, one: SwarmLease, now: float = 0.0) -> Work:
    (effect,) = made.leased(one, now)
    assert isinstance(effect, Begin)
    return effect.work


def handed(made: Driver, work: Work, stage: int, *, backward: bool, now: float = 0.0,
           seconds: float = 0.1) -> list[Effect]:  # fmt: skip
    report = Handed(work.step, work.index, work.lease, work.attempt, stage, backward, seconds)
    return made.handed(report, now)


def broken(made: Driver, work: Work, stage: int, *, busy: bool = False) -> list[Effect]:
    report = Broken(work.step, work.index, work.lease, work.attempt, stage, busy=busy)
    return made.broken(report, 0.0)


def again(effects: list[Effect]) -> Work:
    """Return the new attempt, which the driver's own stage begins."""
    (effect,) = effects
    assert isinstance(effect, Begin)
    return effect.work


def names(work: Work) -> str:
    return "".join(holder.member for holder in work.path[1:])


def test_a_microbatch_goes_there_and_back_and_is_reported() -> None:
    made = driver("a", "b")
    work = begun(made, lease())
    for stage, backward in ((0, False), (1, False), (2, True), (1, True)):
        assert handed(made, work, stage, backward=backward) == []
    finished, release = handed(made, work, 0, backward=True)
    assert isinstance(finished, Finished)
    assert isinstance(release, ReleaseAt)
    report = finished.report
    assert (report.lease, report.stages) == (7, [0, 1, 2])
    assert report.holders == [ME, Holder("a", 1), Holder("b", 1)]
    assert report.row_s["a"] > 0
    assert made.holding == [7]
    made.answered(7)
    assert made.holding == []


def test_the_way_back_ends_at_the_first_stage_that_lacks_it() -> None:
    made = driver("a", "b")
    work = begun(made, lease(stages=(1,)))
    for stage, backward in ((0, False), (1, False), (2, True)):
        assert handed(made, work, stage, backward=backward) == []
    finished, _ = handed(made, work, 1, backward=True)
    assert isinstance(finished, Finished)
    assert finished.report.holders == [Holder("a", 1)]


def test_a_single_stage_is_done_with_its_own_report() -> None:
    made = driver()
    work = begun(made, lease(stages=(0,)))
    assert work.path == [ME]
    finished, _ = handed(made, work, 0, backward=True)
    assert isinstance(finished, Finished)


def test_after_a_failure_the_nearest_holder_goes_on() -> None:
    made = driver("ax", "by")
    work = begun(made, lease())
    handed(made, work, 0, backward=False)
    handed(made, work, 1, backward=False)
    (effect,) = broken(made, work, 2)
    assert isinstance(effect, ResumeAt)
    assert effect.to == work.path[1]
    assert effect.order.stage == 1
    assert effect.order.work.attempt == work.attempt + 1
    assert effect.order.work.path[:2] == work.path[:2]
    assert effect.order.work.path[2] != work.path[2]


def test_a_failed_member_is_banned_and_a_busy_one_only_bypassed() -> None:
    for busy, times in ((False, 0), (True, 2)):
        made = driver("ax", "b")
        work = begun(made, lease())
        failed = work.path[1]
        again(broken(made, work, 1, busy=busy))
        later = [begun(made, lease(number, index=number)) for number in range(10, 14)]
        assert sum(failed in one.path for one in later) >= times
        assert busy or not any(failed in one.path for one in later)


def test_reports_of_an_older_attempt_are_ignored() -> None:
    made = driver("ax", "b")
    work = begun(made, lease())
    other = again(broken(made, work, 1))
    assert broken(made, work, 1) == []
    assert handed(made, work, 0, backward=True) == []
    assert made.holding == [7]
    assert handed(made, other, 1, backward=False) == []


def test_a_lost_holder_on_the_way_back_is_replaced() -> None:
    made = driver("ax", "b")
    work = begun(made, lease())
    for stage, backward in ((0, False), (1, False), (2, True)):
        handed(made, work, stage, backward=backward)
    left = "x" if names(work)[0] == "a" else "a"
    assert names(again(made.peers(table(left, "b"), 1.0))) == left + "b"


def test_members_that_did_their_part_may_leave() -> None:
    made = driver("a", "bx")
    work = begun(made, lease())
    for stage, backward in ((0, False), (1, False), (2, True)):
        handed(made, work, stage, backward=backward)
    left = "x" if names(work)[1] == "b" else "b"
    assert made.peers(table("a", left), 1.0) == []


def test_a_late_member_is_bypassed_without_a_ban() -> None:
    made = driver("ax", "b")
    work = begun(made, lease())
    handed(made, work, 0, backward=False)
    assert made.tick(FIRST_HOP_S - 1) == []
    due = made.next_deadline()
    assert due is not None
    assert again(made.tick(due)).path[1] != work.path[1]
    assert work.path[1] in made.routers[1].usable(due)


def test_a_late_member_without_a_substitute_is_asked_again() -> None:
    made = driver("a", "b")
    work = begun(made, lease())
    handed(made, work, 0, backward=False)
    other = again(made.tick(2 * FIRST_HOP_S))
    assert other.path == work.path
    due = made.next_deadline()
    assert due is not None
    assert due > 2 * FIRST_HOP_S


def test_a_gradient_lost_on_the_last_way_is_asked_for_again() -> None:
    made = driver("a", "b")
    work = begun(made, lease())
    for stage, backward in ((0, False), (1, False), (2, True), (1, True)):
        handed(made, work, stage, backward=backward)
    due = made.next_deadline()
    assert due is not None
    assert again(made.tick(due)).path == work.path


def test_the_own_forward_pass_takes_its_time() -> None:
    made = driver("a", "b")
    begun(made, lease())
    assert made.tick(9 * FIRST_HOP_S) == []


def test_a_stage_without_members_lets_the_microbatch_wait() -> None:
    made = driver("a", "")
    assert made.leased(lease(), 0.0) == []
    assert made.tick(50.0) == []
    (effect,) = made.peers(table("a", "b"), 60.0)
    assert isinstance(effect, Begin)
    assert made.holding == [7]


def test_repeated_leases_and_reports_change_nothing() -> None:
    made = driver("a", "b")
    work = begun(made, lease())
    assert made.leased(lease(), 0.0) == []
    for _ in range(2):
        assert handed(made, work, 0, backward=False) == []
    handed(made, work, 2, backward=True)
    assert handed(made, work, 1, backward=False) == []  # overtaken
    handed(made, work, 0, backward=True)
    assert handed(made, work, 0, backward=True) == []


def test_what_another_lease_brought_through_is_given_up() -> None:
    made = driver("a", "b")
    begun(made, lease(7, index=0))
    begun(made, lease(8, index=1))
    assert made.counted([Share(0, 6), Share(1, 9)], step=3) == []  # their holder was lost
    assert made.counted([Share(0, 9, "other")], step=4) == []  # of the step after
    (release,) = made.counted([Share(0, 9, "other"), Share(1, 8, "me")], step=3)
    assert isinstance(release, ReleaseAt)
    assert release.order.drop
    assert made.holding == [8]


def test_a_new_step_forgets_the_old_one() -> None:
    made = driver("a", "b")
    begun(made, lease())
    made.stepped(4)
    assert made.holding == []
    assert made.next_deadline() is None


def test_failures_are_told_once_though_nothing_is_finished() -> None:
    made = driver("a", "b")
    work = begun(made, lease())
    handed(made, work, 0, backward=False)
    broken(made, work, 1)
    assert [(one.member, one.banned_s > 0) for one in made.failures()] == [("a", True)]
    assert made.failures() == []
    assert made.holding  # it waits for a member of the stage
