from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.errors import ConfigError
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.methods.every_step import EveryStep, OneBitAdam
from atoll.run import Run
from atoll.run.place import Membership
from atoll.strategies.outer.onebit_adam import OneBitAdamOuter
from atoll.strategies.vectors.exact_math import uniform
from atoll.strategies.vectors.flat import Flat
from tests.contracts.strategy_suite import (
    Reference,
    StrategySuite,
    adamw,
    sgd,
    small_model,
    squared_error,
    start_run,
    train_together,
)

LR, BETAS, DECAY, EPS = 0.02, (0.9, 0.95), 0.1, 1e-8
"""Of the suite's AdamW."""


class TestOneBitAdam(StrategySuite):
    name = "onebit_adam"
    options = OneBitAdam(warmup_steps=4)
    codec = "sign"
    coarse = "sign"
    wires = ("fp32", "int8", "sign")

    def same_as_plain(self) -> Any:
        """Plain AdamW has no frozen variance: the warm-up lasts."""
        return OneBitAdam(warmup_steps=100)

    def reference(self, members: int, steps: int) -> Tensor:
        """AdamW in double precision whose variance stays as it is after the fourth step."""
        those = Reference.make(members, sgd)
        sizes = [parameter.numel() for parameter in those.models[0].parameters()]
        theta = those.vectors()[0]
        m, v = torch.zeros_like(theta), torch.zeros_like(theta)
        root = v
        for step in range(1, steps + 1):
            g = sum((raw_gradient(those, i) for i in range(members)), torch.zeros(1)) / members
            if step <= 4:
                g = g * (1.0 / (g.norm() + 1e-6)).clamp(max=1.0)
                v = BETAS[1] * v + (1 - BETAS[1]) * g * g
                root = (v / (1 - BETAS[1] ** step)).sqrt()
            if step == 5:
                parts = [p.clamp(min=0.01 * float(p.square().mean().sqrt())) for p in
                         torch.split(root, sizes)]  # fmt: skip
                root = torch.cat(parts)
            m = BETAS[0] * m + (1 - BETAS[0]) * g
            theta = (1 - LR * DECAY) * theta - LR * m / (1 - BETAS[0] ** step) / (root + EPS)
            those.assign(theta)
        return theta


def raw_gradient(those: Reference, member: int) -> Tensor:
    model = those.models[member]
    those.optimizers[member].zero_grad()
    squared_error(model, next(those.streams[member]))[0].backward()  # type: ignore[no-untyped-call]
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def give(run: Any, gradient: Tensor) -> None:
    """Do one step with a given gradient."""
    flat = Flat(run.task.parameters())
    for parameter, part in zip(flat.tensors, flat.views(gradient), strict=True):
        parameter.grad = part.clone()
    run.outer.gradients(run.task)
    run.task.optimizer.step()
    run.task.advance()


def test_the_warm_up_is_data_parallel_adam() -> None:
    warm = train_together(OneBitAdam(warmup_steps=9), members=3, steps=6, codec="sign")
    plain = train_together(EveryStep(), members=3, steps=6)
    assert torch.equal(warm[0].vector(), plain[0].vector())


def test_the_variance_stays_as_it_was_at_the_end_of_the_warm_up() -> None:
    run = start_run(OneBitAdam(warmup_steps=3), MemoryGroups(1)[0], 0)
    run.train(4)
    divisor = run.outer.state_dict()["shared.divisor"].clone()
    moments = [s["exp_avg_sq"].clone() for s in run.task.optimizer.state.values()]
    run.train(4)
    assert torch.equal(run.outer.state_dict()["shared.divisor"], divisor)
    for state, before in zip(run.task.optimizer.state.values(), moments, strict=True):
        assert torch.equal(state["exp_avg_sq"], before)


def test_nothing_is_lost_on_either_side() -> None:
    """What was received, and what members and owners still owe, is what was to be sent.

    By the linear recursion of the momentum: with beta_1 = 0 each step sends its own gradient.
    """
    members, warm, steps = 3, 2, 7

    def momentless(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.0, 0.9))

    gradients = {(m, t): uniform(26, seed=10 * m + t) for m in range(members) for t in range(steps)}

    def body(group: Group) -> tuple[Tensor, dict[str, Tensor]]:
        options, slot = OneBitAdam(warmup_steps=warm), int(group.me[1:])
        run = start_run(options, group, slot, codec="sign", optimizer=momentless)
        for step in range(warm):
            give(run, gradients[slot, step])
        before = run.vector().double()
        for step in range(warm, steps):
            give(run, gradients[slot, step])
        return before - run.vector().double(), run.outer.state_dict()

    results = MemoryGroups(members).together(body)
    divisor = results[0][1]["shared.divisor"].double()
    sent = [g.double() / members for (_, t), g in gradients.items() if t >= warm]
    given = sum(sent, torch.zeros(1)) / divisor
    owed = sum((state["own.error"].double() / members for _, state in results), torch.zeros(1))
    answers = sum((state["own.owed"].double() for _, state in results), torch.zeros(1))
    assert answers.abs().max() > 1e-3
    assert (results[0][0] + owed + answers - given).abs().max() < 1e-4


def test_common_state_is_equal_on_all_members_after_the_warm_up() -> None:
    runs = train_together(OneBitAdam(warmup_steps=2), members=3, steps=6, codec="sign")
    states = [run.outer.shared_state() for run in runs]
    assert states[0].keys() == {
        "shared.base", "shared.momentum", "shared.divisor", "shared.steps"
    }  # fmt: skip
    for other in states[1:]:
        assert all(torch.equal(states[0][key], other[key]) for key in other)


def test_first_gradient_after_warm_up_does_not_leap() -> None:
    run = start_run(OneBitAdam(warmup_steps=3), MemoryGroups(1)[0], 0)
    first = uniform(26, seed=1)
    first[3] = 0.0
    for _ in range(3):
        give(run, first)
    before = run.vector()
    give(run, torch.full((26,), 0.5))
    assert (run.vector() - before)[3].abs() < 100 * 0.02


def test_who_comes_after_the_warm_up_needs_no_moments_of_its_own() -> None:
    donor = start_run(OneBitAdam(warmup_steps=2), MemoryGroups(1)[0], 0)
    donor.train(4)
    newcomer = start_run(
        OneBitAdam(warmup_steps=2), MemoryGroups(1, start_round=donor.task.round)[0], 0,
        model=donor.task.model, begin=False,
    )  # fmt: skip
    newcomer.task.step, newcomer.task.round = donor.task.step, donor.task.round
    newcomer.outer.load_state_dict(donor.outer.shared_state())
    newcomer.outer.rejoin(newcomer.task)
    newcomer.stream = donor.stream
    newcomer.train(2)
    assert isinstance(newcomer.outer, OneBitAdamOuter)
    assert torch.isfinite(newcomer.vector()).all()


def test_plain_adam_adds_its_decay_to_the_gradient() -> None:
    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.1, betas=(0.0, 0.9), weight_decay=0.5)

    run = start_run(OneBitAdam(warmup_steps=1), MemoryGroups(1)[0], 0, optimizer=adam)
    give(run, uniform(26, seed=4))
    before = run.vector()
    give(run, torch.zeros(26))
    divisor = run.outer.state_dict()["shared.divisor"]
    assert (run.vector() - (before - 0.1 * 0.5 * before / divisor)).abs().max() < 1e-6


@pytest.mark.skipif(
    "decoupled_weight_decay" not in inspect.signature(torch.optim.Adam).parameters,
    reason="torch before 2.7 has decoupled decay in AdamW only",
)
def test_decoupled_decay_of_plain_adam_is_that_of_adamw() -> None:
    def trained(kind: Any) -> Tensor:
        def optimizer(model: nn.Module) -> torch.optim.Optimizer:
            made: torch.optim.Optimizer = kind(model.parameters(), lr=0.1, weight_decay=0.5)
            return made

        run = start_run(OneBitAdam(warmup_steps=1), MemoryGroups(1)[0], 0, optimizer=optimizer)
        run.train(3)
        return run.vector()

    plain = partial(torch.optim.Adam, decoupled_weight_decay=True)
    assert torch.equal(trained(plain), trained(torch.optim.AdamW))


@pytest.mark.parametrize(
    "optimizer",
    [sgd, lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True)],
    ids=["sgd", "amsgrad"],
)
def test_other_optimizers_are_refused_with_what_to_use(optimizer: Any) -> None:
    with pytest.raises(ConfigError, match="needs Adam"):
        start_run(OneBitAdam(), MemoryGroups(1)[0], 0, optimizer=optimizer)


def test_resuming_after_the_warm_up_without_moments_is_refused() -> None:
    run = start_run(OneBitAdam(warmup_steps=2), MemoryGroups(1)[0], 0, optimizer=adamw)
    run.task.step = 2
    with pytest.raises(ConfigError, match="no moments"):
        run.train(1)


def test_codecs_with_a_memory_are_refused() -> None:
    with pytest.raises(ConfigError, match="1-bit Adam cannot use codec"):
        start_run(OneBitAdam(), MemoryGroups(1)[0], 0, codec="feedback(sign)", model=small_model())


@pytest.mark.parametrize(
    "options", [OneBitAdam(warmup_steps=-1), OneBitAdam(floor=-1.0), OneBitAdam(weight="x")]
)
def test_options_out_of_range_are_refused(options: OneBitAdam) -> None:
    with pytest.raises(ConfigError):
        options.build()


def test_unfreezing_after_the_warm_up_is_refused_in_words(tmp_path: Path) -> None:
    with Run(MemoryGroups(1)[0], Membership(tmp_path, slot=0, num_slots=1)) as run:
        model = nn.Sequential(nn.Linear(5, 5).requires_grad_(False), nn.Linear(5, 2))
        inner = torch.optim.AdamW(model[1].parameters(), 0.02)
        optimizer = run.wrap(model, inner, outer=OneBitAdam(warmup_steps=2), codec="sign")
        for _ in range(4):
            model(torch.ones(1, 5)).sum().backward()
            optimizer.step()
        model[0].requires_grad_(True)
        inner.add_param_group({"params": list(model[0].parameters())})
        model(torch.ones(1, 5)).sum().backward()
        with pytest.raises(ConfigError, match=r"became trainable.*0\.weight, 0\.bias"):
            optimizer.step()
