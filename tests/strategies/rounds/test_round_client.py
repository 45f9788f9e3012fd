"""What members tell of their periods when they join, whatever the strategy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import atoll
from atoll.clock import VirtualClock
from atoll.group.base import Group, Reduced
from atoll.group.in_process.groups import MemoryGroups
from atoll.group.period import PeriodReport
from atoll.group.run_round import CommittedRound
from atoll.group.single import SingleGroup
from atoll.methods.every_step import EveryStep
from atoll.methods.periodic import Average, DiLoCo, NoSync
from atoll.run import Run as Script
from atoll.run.place import Membership
from atoll.strategies.rounds.round_client import RoundClient
from atoll.task import Period
from atoll.wire.messages import Lease, MemberStats, RoundPlan, Verdict
from tests.contracts.strategy_suite import Run, small_model, squared_error, start_run

STEPS = 12


class RecordedGroups(MemoryGroups):
    """Keeps the statistics that members report, join by join."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.stats: dict[str, list[MemberStats]] = {f"w{i}": [] for i in range(n)}

        join = self.coordinator.join

        def noting(member: str, report: PeriodReport, *, timeout_s: float | None) -> Any:
            if report.stats is not None:
                self.stats[member].append(report.stats)
            return join(member, report, timeout_s=timeout_s)

        self.coordinator.join = noting  # type: ignore[method-assign]


def train(options: Any, members: int = 2) -> tuple[RecordedGroups, list[Run]]:
    groups = RecordedGroups(members)

    def body(group: Group) -> Run:
        run = start_run(options, group, int(group.me[1:]))
        before = run.vector()
        run.rounds.append(before)
        run.train(STEPS)
        run.note(run.outer.finish(run.task))
        return run

    return groups, groups.together(body)


@pytest.mark.parametrize("options", [Average(every=4), DiLoCo(every=4), EveryStep()])
def test_tensor_rounds_report_norm_loss_and_time(options: Any) -> None:
    groups, runs = train(options)
    per_round = STEPS // len(runs[0].results)
    for run in runs:
        start, *accounts = groups.stats[run.task.member]
        assert (start.update_norm, start.loss, start.phases) == (None, None, {})
        assert len(accounts) == len(run.results)
        for number, account in enumerate(accounts):
            steps = run.losses[number * per_round : (number + 1) * per_round]
            assert account.loss == pytest.approx(sum(steps) / len(steps))
            assert account.update_norm is not None
            assert account.update_norm > 0
            phases = {"wait", "send", "vote"} | ({"apply"} if number else set())
            assert account.phases.keys() == phases
            assert all(seconds >= 0 for seconds in account.phases.values())


def test_norm_is_that_of_the_contribution_before_it_is_encoded() -> None:
    groups, (run,) = train(Average(every=STEPS), members=1)
    moved = run.rounds[0] - run.rounds[-1]
    assert groups.stats["w0"][-1].update_norm == pytest.approx(float(moved.norm()), rel=1e-5)


def test_meetings_without_a_contribution_tell_no_norm() -> None:
    groups, runs = train(NoSync(every=4))
    accounts = groups.stats["w0"]
    assert [account.update_norm for account in accounts] == [None] * 3
    assert accounts[0].loss == pytest.approx(sum(runs[0].losses[:4]) / 4)


def test_members_of_a_script_tell_the_same(tmp_path: Path) -> None:
    groups = RecordedGroups(2)

    def body(group: Group) -> None:
        run = Script(group, Membership(tmp_path, seed=1, slot=int(group.me[1:]), num_slots=2))
        model = small_model()
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer = run.wrap(model, inner, outer=atoll.Average(every=2))
        for step in range(4):
            optimizer.zero_grad()
            batch = torch.ones(2, 5), torch.ones(2, 2)
            loss, _ = squared_error(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            run.log(loss=float(step))

    groups.together(body)
    last = groups.stats["w1"][-1]
    assert last.update_norm is not None
    assert last.loss == 1.5, "of steps 1 and 2: a script reports its loss after the step"
    assert "apply" in last.phases


def test_newcomer_reports_no_times_of_missed_rounds() -> None:
    groups = RecordedGroups(1)
    run = start_run(Average(every=2), groups[0], 0)
    run.train(2)
    run.outer.rejoin(run.task)
    run.train(2)
    assert groups.stats["w0"][-1].phases == {}


@pytest.mark.parametrize(
    ("trip_s", "step_s", "after"),
    [(0.25, 0.1, 17), (0.08, 0.2, 19), (0.001, 0.1, None), (0.3, 2.0, None)],
)
def test_a_round_is_announced_a_way_to_the_hub_before_its_end(
    trip_s: float, step_s: float, after: int | None
) -> None:
    """A plan is then there when the last step ends; not for long steps or a near hub."""
    clock, group = VirtualClock(), Announced()
    task = start_run(DiLoCo(every=20), group, 0).task
    client = RoundClient(group, clock)
    client.announce(task, base="base")
    assert not group.reports, "no way to the hub was measured yet"
    seconds = {"join": 9.0, "reduce": 1.0, "commit": trip_s}
    client.apply_verdict(task, CommittedRound(REDUCED, PLAN, VERDICT, seconds, 1, 0, 0))
    for done in range(1, 20):
        clock.advance(step_s)
        task.period = Period(0, 20, 20, done)
        client.announce(task, base="base")
    found = [report.steps for report in group.reports]
    assert found == ([] if after is None else list(range(after, 20)))
    assert all(report.stats is not None for report in group.reports)


@pytest.mark.parametrize("known", [True, False])
def test_only_known_positions_in_the_data_are_announced(known: bool) -> None:
    """They count with the contribution, even if its member is lost before its vote."""

    class Stretch:
        def place(self) -> tuple[int, dict[str, int]]:
            return 3, {"offset": 10}

        def place_after(self, steps: int) -> tuple[int, dict[str, int]] | None:
            return (3, {"offset": 10 + steps}) if known else None

        def move(self, slot: int, cursor: Mapping[str, int]) -> None:
            raise AssertionError("nothing was leased")

    clock, group = VirtualClock(), Announced()
    task = start_run(DiLoCo(every=20), group, 0).task
    task.stretch = Stretch()
    client = RoundClient(group, clock)
    seconds = {"join": 0.3, "reduce": 1.0, "commit": 0.3}
    client.apply_verdict(task, CommittedRound(REDUCED, PLAN, VERDICT, seconds, 1, 0, 0))
    clock.advance(1.8)
    task.period = Period(0, 20, 20, 18)
    client.announce(task, base="base")
    found = [report.lease for report in group.reports]
    assert found == ([Lease(3, {"offset": 12})] if known else [])


class Announced(SingleGroup):
    """Keeps what is announced to it."""

    def __init__(self) -> None:
        super().__init__()
        self.reports: list[PeriodReport] = []

    def announce(self, report: PeriodReport) -> None:
        self.reports.append(report)


PLAN = RoundPlan("job", 0, 1, ["w0"], "relay")
VERDICT = Verdict(0, 1, True, "digest", ["w0"])
REDUCED = Reduced(
    tensors=[], contributors=("w0",), weight=1.0, sent_bytes=0, received_bytes=0, digest="digest"
)
