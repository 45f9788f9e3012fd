from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.codec import make_codec
from atoll.errors import ConfigError
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.methods.every_step import EveryStep, PowerSGD
from atoll.strategies.outer.powersgd import Layout, PowerSGDOuter
from atoll.strategies.vectors.exact_math import uniform
from atoll.strategies.vectors.flat import Flat
from atoll.task import Task
from tests.contracts.strategy_suite import (
    Reference,
    StrategySuite,
    adamw,
    small_model,
    squared_error,
    start_run,
    train_together,
)


class TestPowerSGD(StrategySuite):
    name = "powersgd"
    options = PowerSGD(rank=1)
    coarse = "bf16"
    wires = ("fp32", "fp16")

    def reference(self, members: int, steps: int) -> Tensor:
        """Algorithms 1 and 2 of the paper, in double precision, with torch's own factorisation."""
        those = Reference.make(members, adamw)
        shapes = [parameter.shape for parameter in those.models[0].parameters()]
        q = _first_factors(self.options, shapes)
        errors = [[torch.zeros(s, dtype=torch.float64) for s in shapes] for _ in range(members)]
        for _ in range(steps):
            wanted = [_gradients(those, m, errors[m]) for m in range(members)]
            for index in range(len(shapes)):
                each = [w[index] for w in wanted]
                if index not in q:
                    direction = sum(each, torch.zeros(1)) / members
                else:
                    p, _ = torch.linalg.qr(sum(w @ q[index] for w in each) / members)
                    mine = [w.T @ p for w in each]
                    q[index] = sum(mine, torch.zeros(1)) / members
                    direction = p @ q[index].T
                    for m in range(members):
                        errors[m][index] = each[m] - p @ mine[m].T
                for model in those.models:
                    list(model.parameters())[index].grad = direction.float()
            for model, optimizer in zip(those.models, those.optimizers, strict=True):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        return those.vectors()[0]


def _first_factors(options: PowerSGD, shapes: list[torch.Size]) -> dict[int, Tensor]:
    """Return the common random start: the same numbers, cut by the layout."""
    outer = options.build()
    assert isinstance(outer, PowerSGDOuter)
    model = small_model()
    task = Task(model, adamw(model))
    outer.setup(task, group=MemoryGroups(1)[0], codec=make_codec("fp32"))
    layout = Layout.of(shapes, rank=options.rank)
    parts = torch.split(
        outer.state_dict()["shared.q"], [m.columns * m.rank for m in layout.matrices]
    )
    found: dict[int, Tensor] = {}
    for matrix, part in zip(layout.matrices, parts, strict=True):
        starts = [sum(s.numel() for s in shapes[:i]) for i in range(len(shapes))]
        found[starts.index(matrix.place.start)] = part.view(matrix.columns, matrix.rank).double()
    return found


def _gradients(those: Reference, member: int, errors: list[Tensor]) -> list[Tensor]:
    model = those.models[member]
    those.optimizers[member].zero_grad()
    squared_error(model, next(those.streams[member]))[0].backward()  # type: ignore[no-untyped-call]
    return [
        parameter.grad.double() + error
        for parameter, error in zip(model.parameters(), errors, strict=True)
        if parameter.grad is not None
    ]


def wide_model(*, seed: int = 9) -> nn.Module:
    """Return a model whose only matrix is worth compressing at rank 3."""
    model = nn.Linear(24, 20)
    with torch.no_grad():
        model.weight.copy_(0.1 * uniform(480, seed=seed).view(20, 24))
        model.bias.zero_()
    return model


def wide_batches(slot: int, step: int) -> tuple[Tensor, Tensor]:
    """Return one sample; neither inputs nor targets of members are alike."""
    number = 100 * slot + step
    return uniform(24, seed=number).view(1, 24), uniform(20, seed=5_000 + number).view(1, 20)


def still(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0)


def moving(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def train_wide(options: Any, *, optimizer: Any, steps: int, members: int = 3) -> list[Any]:
    """Train on one sample per member and step: each member's gradient is a matrix of rank 1."""

    def body(group: Group) -> tuple[Tensor, list[Tensor], dict[str, Tensor], Tensor]:
        slot = int(group.me[1:])
        run = start_run(options, group, slot, optimizer=optimizer, model=wide_model(), clip=0.0)
        run.stream = (wide_batches(slot, step) for step in range(steps))
        directions: list[Tensor] = []
        for _ in range(steps):
            run.train(1)
            directions.append(
                Flat([p.grad for p in run.task.parameters() if p.grad is not None]).read()
            )
        return run.vector(), directions, run.outer.state_dict(), local_gradients(slot, steps)

    return MemoryGroups(members).together(body)


def local_gradients(slot: int, steps: int) -> Tensor:
    """Return the sum of a member's own gradients in double precision, at the first parameters."""
    model = wide_model().double()
    for step in range(steps):
        x, y = wide_batches(slot, step)
        nn.functional.mse_loss(model(x.double()), y.double()).backward()  # type: ignore[no-untyped-call]
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_a_rank_that_suffices_is_exact() -> None:
    compressed = train_wide(PowerSGD(rank=3), optimizer=moving, steps=3)
    plain = train_wide(EveryStep(), optimizer=moving, steps=3)
    assert (compressed[0][0] - plain[0][0]).abs().max() < 1e-6
    assert compressed[0][2]["own.error"].abs().max() < 2e-6


def test_applied_plus_residual_is_all_gradients() -> None:
    results = train_wide(PowerSGD(rank=1), optimizer=still, steps=5)
    applied = torch.stack(results[0][1]).double().sum(0)
    owed = torch.stack([state["own.error"] for _, _, state, _ in results]).double().mean(0)
    everything = torch.stack([sums for *_, sums in results]).mean(0)
    assert owed.abs().max() > 1e-3
    assert (applied + owed - everything).abs().max() < 1e-6


def test_equal_factors_start_the_next_round() -> None:
    results = train_wide(PowerSGD(rank=2), optimizer=moving, steps=3)
    factors = [state["shared.q"] for _, _, state, _ in results]
    assert torch.equal(factors[0], factors[1])
    assert torch.equal(factors[0], factors[2])


def test_a_factor_that_died_away_starts_anew() -> None:
    """A gradient of rank 1 kills two of three columns; they must come back for the next one."""

    def body(group: Group) -> Tensor:
        run = start_run(PowerSGD(rank=3), group, 0, optimizer=moving, model=wide_model(), clip=0.0)
        slots = [0, 0, *range(8)]
        run.stream = (wide_batches(slot + int(group.me[1:]) * (slot > 0), 1) for slot in slots)
        run.train(10)
        return run.outer.state_dict()["own.error"]

    assert all(error.abs().max() < 1e-6 for error in MemoryGroups(2).together(body))


def test_what_is_owed_is_paid_by_who_is_left_alone() -> None:
    groups = MemoryGroups(2)

    def body(group: Group) -> Tensor | None:
        slot = int(group.me[1:])
        run = start_run(
            PowerSGD(rank=1), group, slot, optimizer=still, model=wide_model(), clip=0.0
        )
        run.stream = (wide_batches(slot, step) for step in range(3))
        run.train(2)
        owed = run.outer.state_dict()["own.error"].clone()
        assert owed.any()
        if slot:
            group.leave()
            return None
        run.train(1)
        assert not run.outer.state_dict()["own.error"].any()
        direction = Flat([p.grad for p in run.task.parameters() if p.grad is not None]).read()
        return direction - owed

    left = next(found for found in groups.together(body) if found is not None)
    expected = local_gradients(0, 3) - local_gradients(0, 2)
    assert (left.double() - expected).abs().max() < 1e-6


def test_only_matrices_that_get_smaller_are_compressed() -> None:
    layout = Layout.of([(20, 24), (20,), (4, 3), (8, 4, 3, 3), ()], rank=2)
    assert [(m.rows, m.columns, m.rank) for m in layout.matrices] == [(20, 24, 2), (8, 36, 2)]
    assert layout.sizes == (2 * 28 + 20 + 12 + 1, 2 * (24 + 36))


def test_bytes_of_a_wide_model_are_rank_times_its_sides() -> None:
    run = start_run(PowerSGD(rank=2), MemoryGroups(1)[0], 0, model=wide_model())
    found = run.outer.traffic(500, 2, steps=1)
    assert found.relay_sent_bytes == 256 // 2 + 4 * (2 * (20 + 24) + 20)


@pytest.mark.parametrize("codec", ["feedback(int8)", "sign"])
def test_codecs_with_a_memory_or_a_coarse_grain_are_refused(codec: str) -> None:
    with pytest.raises(ConfigError, match="PowerSGD cannot use codec"):
        start_run(PowerSGD(), MemoryGroups(1)[0], 0, codec=codec)


def test_warm_up_equals_data_parallel_training() -> None:
    warm = train_together(PowerSGD(rank=1, warmup_steps=4), members=3, steps=4)
    plain = train_together(EveryStep(), members=3, steps=4)
    assert torch.equal(warm[0].vector(), plain[0].vector())


def test_bytes_of_a_warm_up_are_those_of_whole_gradients() -> None:
    options = PowerSGD(rank=1, warmup_steps=4)
    runs = train_together(options, members=2, steps=6)
    expected = runs[0].outer.traffic(26, 2, steps=6).relay_sent_bytes
    assert sum(result.sent_bytes for result in runs[0].results) + 128 == expected
    assert expected == 128 + 4 * 4 * 26 + 2 * 4 * (3 + 5 + 2 + 3 + 3 + 2)


@pytest.mark.parametrize(
    "options", [PowerSGD(rank=0), PowerSGD(warmup_steps=-1), PowerSGD(weight="size")]
)
def test_options_out_of_range_are_refused(options: PowerSGD) -> None:
    with pytest.raises(ConfigError):
        options.build()
