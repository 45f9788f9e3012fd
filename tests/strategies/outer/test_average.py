from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from atoll.errors import ConfigError
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.methods.every_step import EveryStep
from atoll.methods.periodic import Average
from atoll.strategies.inner.local import Local
from atoll.strategies.outer.average import AverageOuter
from tests.contracts.strategy_suite import (
    Reference,
    StrategySuite,
    adamw,
    batches,
    sgd,
    small_model,
    squared_error,
    start_run,
    train_together,
)


class TestAverage(StrategySuite):
    name = "average"
    options = Average(every=4)

    def reference(self, members: int, steps: int) -> Tensor:
        those = Reference.make(members, adamw)
        for step in range(1, steps + 1):
            for member in range(members):
                those.gradient_step(member)
            if step % 4 == 0 or step == steps:
                those.assign(sum(those.vectors(), torch.zeros(1)) / members)
        return those.vectors()[0]


def test_every_step_of_plain_sgd_is_data_parallel() -> None:
    """With one step per round, averaging parameters is averaging gradients."""
    same = {"members": 3, "steps": 6, "optimizer": sgd, "clip": 0.0}
    averaged = train_together(Average(every=1), **same)  # type: ignore[arg-type]
    parallel = train_together(EveryStep(), **same)  # type: ignore[arg-type]
    assert (averaged[0].vector() - parallel[0].vector()).abs().max() < 1e-6


def test_the_same_data_on_every_member_equals_one_member() -> None:
    def body(group: Group) -> Tensor:
        run = start_run(Average(every=4), group, 0)
        run.train(8)
        return run.vector()

    many = MemoryGroups(3).together(body)
    alone = start_run(Average(every=4), MemoryGroups(1)[0], 0)
    alone.train(8)
    assert (many[0] - alone.vector()).abs().max() < 1e-6


def test_uneven_batches_weigh_by_their_tokens() -> None:
    def body(group: Group) -> Tensor:
        slot = int(group.me[1:])
        run = start_run(Average(every=1), group, slot, optimizer=sgd, size=(2, 6)[slot])
        run.train(1)
        return run.vector().double()

    result = MemoryGroups(2).together(body)[0]
    vectors = []
    for slot, size in enumerate((2, 6)):
        model = small_model()
        optimizer = sgd(model)
        squared_error(model, next(batches(slot, size=size)))[0].backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        vectors.append(torch.cat([p.detach().double().flatten() for p in model.parameters()]))
    assert (result - (0.25 * vectors[0] + 0.75 * vectors[1])).abs().max() < 1e-6


class TestPostLocal(StrategySuite):
    """In every step at first."""

    name = "average_post_local"
    options = Average(every=4, every_step_until=3)

    def reference(self, members: int, steps: int) -> Tensor:
        those = Reference.make(members, adamw)
        for step in range(1, steps + 1):
            for member in range(members):
                those.gradient_step(member)
            if step in (1, 2, 3, 7, 10):
                those.assign(sum(those.vectors(), torch.zeros(1)) / members)
        return those.vectors()[0]


def due_steps(options: Average, steps: int) -> list[int]:
    outer, step, due = AverageOuter(options), 0, []
    while step < steps:
        step = outer.next_due(step)
        due.append(step)
    return due


def test_rounds_spread_by_doubling_to_every_h_steps() -> None:
    assert due_steps(Average(every=4, every_step_until=3), 15) == [1, 2, 3, 7, 11, 15]
    assert due_steps(Average(every=6, growing=True), 25) == [1, 3, 7, 13, 19, 25]
    both = Average(every=4, growing=True, every_step_until=2)
    assert due_steps(both, 13) == [1, 2, 3, 5, 9, 13]


def test_latecomer_finds_the_next_due_round() -> None:
    outer = AverageOuter(Average(every=6, growing=True, every_step_until=2))
    due = due_steps(outer.options, 40)
    for step in range(30):
        assert outer.next_due(step) == min(d for d in due if d > step)


@pytest.mark.parametrize("options", [Average(every=0), Average(every_step_until=-1)])
def test_options_out_of_range_are_refused(options: Average) -> None:
    with pytest.raises(ConfigError, match="too small"):
        options.build()


class Bowl(nn.Module):
    """One parameter vector; a member's batch says where its own optimum is, and how steep."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(2))


def bowl_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    centre, steepness = batch
    away = next(model.parameters()) - centre
    return 0.5 * (steepness * away.square()).sum(), 1


CENTRES = (torch.tensor([1.0, -2.0]), torch.tensor([3.0, 4.0]))
STEEP = (torch.tensor([1.0, 1.0]), torch.tensor([4.0, 0.5]))


def in_bowls(every: int, *, rate: float, rounds: int, steepness: tuple[Tensor, Tensor]) -> Tensor:
    """Return where two members with bowls of their own come to rest."""

    def body(group: Group) -> Tensor:
        slot = int(group.me[1:])
        run = start_run(
            Average(every=every), group, slot, model=Bowl(), clip=0.0,
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=rate),
        )  # fmt: skip
        run.inner = Local(bowl_loss)
        run.stream = iter([(CENTRES[slot], steepness[slot])] * (every * rounds))
        run.train(every * rounds)
        return run.vector()

    return MemoryGroups(2).together(body)[0]


def test_equal_bowls_are_left_at_the_rate_of_the_closed_form() -> None:
    ones = (torch.ones(2), torch.ones(2))
    rate, every, mean = 0.1, 3, (CENTRES[0] + CENTRES[1]) / 2
    for rounds in (1, 4):
        found = in_bowls(every, rate=rate, rounds=rounds, steepness=ones)
        expected = mean + (1 - rate) ** (every * rounds) * (torch.zeros(2) - mean)
        assert (found - expected).abs().max() < 1e-5


def test_uneven_curvature_biases_less_at_lower_rates() -> None:
    """A known limit of Local SGD: only with H = 1, or ever smaller rates, is the optimum found."""
    weighted = sum(s * c for s, c in zip(STEEP, CENTRES, strict=True))
    optimum = weighted / (STEEP[0] + STEEP[1])

    def bias(every: int, rate: float, rounds: int) -> float:
        found = in_bowls(every, rate=rate, rounds=rounds, steepness=STEEP)
        return float((found - optimum).norm())

    assert bias(1, 0.2, 80) < 1e-4
    assert bias(8, 0.2, 30) > 0.2
    assert bias(8, 0.02, 100) < 0.3 * bias(8, 0.2, 30)


def test_after_finish_the_next_period_begins() -> None:
    run = start_run(Average(every=5), MemoryGroups(1)[0], 0)
    run.train(3)
    run.note(run.outer.finish(run.task))
    assert run.outer.committed(run.task).step == 3
    assert (run.task.period.start, run.task.period.done, run.task.period.length) == (3, 0, 2)
    assert run.train_noting(7) == [5, 10]
