"""FedNova: equal steps give the plain mean to the bit, unequal ones pull equally hard."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from atoll.codec.registry import make_codec
from atoll.errors import ConfigError
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.methods.every_step import EveryStep
from atoll.methods.overlapped import Streaming
from atoll.methods.periodic import Average, DiLoCo
from atoll.strategies.inner.local import Local
from atoll.strategies.vectors.exact_math import evened
from atoll.task import Task
from tests.contracts.strategy_suite import (
    Batch,
    Reference,
    Run,
    StrategySuite,
    adamw,
    sgd,
    squared_error,
    start_run,
    train_together,
)


class TestFedNova(StrategySuite):
    """Where all take the same number of steps its golden file is a copy of that of Local SGD."""

    name = "average_fednova"
    options = Average(every=4, weight="fednova")

    def reference(self, members: int, steps: int) -> Tensor:
        those = Reference.make(members, adamw)
        for step in range(1, steps + 1):
            for member in range(members):
                those.gradient_step(member)
            if step % 4 == 0 or step == steps:
                those.assign(sum(those.vectors(), torch.zeros(1)) / members)
        return those.vectors()[0]


@pytest.mark.parametrize("codec", ["fp32", "feedback(int8)"])
def test_equal_steps_are_equal_weights_to_the_bit(codec: str) -> None:
    given = {"members": 3, "steps": 11, "codec": codec}
    plain = train_together(DiLoCo(every=4, weight="equal"), **given)  # type: ignore[arg-type]
    even = train_together(DiLoCo(every=4, weight="fednova"), **given)  # type: ignore[arg-type]
    assert torch.equal(plain[0].vector(), even[0].vector())


PACES = (1.0, 0.5, 0.25)
"""Of three members: of 8 planned steps they take 8, 4 and 2."""


def keep_pace(task: Task, slot: int) -> None:
    """Have a member take its number of steps in the period that begins; groups would even it."""
    if task.period.done == 0:
        task.pace = PACES[slot]
        task.begin_period(task.period.start + task.period.length)


def uneven(options: Average, *, rounds: int, **settings: object) -> list[Run]:
    """Train members of different pace through some rounds."""

    def body(group: Group) -> Run:
        slot = int(group.me[1:])
        run = start_run(options, group, slot, **settings)  # type: ignore[arg-type]
        while run.task.step < 8 * rounds:
            keep_pace(run.task, slot)
            run.train(1)
        return run

    return MemoryGroups(len(PACES)).together(body)


def test_unequal_steps_follow_the_formula() -> None:
    """`Delta = tau sum_i p_i Delta_i / H_i`, in double precision."""
    runs = uneven(Average(every=8, weight="fednova"), rounds=2, optimizer=sgd)
    those = Reference.make(3, sgd)
    steps = [8, 4, 2]
    tau = sum(steps) / 3
    for _ in range(2):
        start = those.vectors()[0]
        for member, count in enumerate(steps):
            for _ in range(count):
                those.gradient_step(member)
        moves = [start - now for now in those.vectors()]
        mean = sum((m / h for m, h in zip(moves, steps, strict=True)), torch.zeros(1)) / 3
        those.assign(start - tau * mean)
    for run in runs:
        assert (run.vector().double() - those.vectors()[0]).abs().max() < 2e-6
    assert len({run.results[-1].digest for run in runs}) == 1


def pulled(slot: int) -> Iterator[Batch]:
    """Yield the same sample for ever: the place to which a member's data pulls."""
    while True:
        yield torch.ones(1, 1), torch.tensor([[(0.0, 3.0, 9.0)[slot]]])


def place(weight: str) -> float:
    """Return where members with one place each meet, of which the first takes most steps."""

    def body(group: Group) -> float:
        slot = int(group.me[1:])
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        task = Task(model, torch.optim.SGD(model.parameters(), lr=0.005), member=group.me)
        outer = Average(every=8, weight=weight).build()
        outer.setup(task, group=group, codec=make_codec("fp32"))
        outer.begin(task)
        inner, stream = Local(squared_error, clip=0.0), pulled(slot)
        while task.step < 8 * 150:
            keep_pace(task, slot)
            inner.step(task, next(stream), outer)
        return float(model.weight.detach())

    return MemoryGroups(len(PACES)).together(body)[0]


def test_the_bias_toward_fast_members_is_gone() -> None:
    """Quadratics with their least values at 0, 3 and 9: all together it is at 4."""
    biased, even = place("equal"), place("fednova")
    expected = (8 * 0.0 + 4 * 3.0 + 2 * 9.0) / 14  # weights grow with the steps
    assert biased == pytest.approx(expected, abs=0.15)
    assert even == pytest.approx(4.0, abs=0.15)


def test_buffers_are_averaged_as_they_are() -> None:
    delta = torch.arange(5.0)
    sent = evened(delta, num_parameters=3, steps=2, tau=3.0)
    assert sent.tolist() == [0.0, 1.5, 3.0, 3.0, 4.0]
    assert delta.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert evened(delta, num_parameters=3, steps=3, tau=3.0) is delta
    assert evened(delta, num_parameters=3, steps=0, tau=3.0) is delta


@pytest.mark.parametrize("options", [EveryStep(weight="fednova"), Streaming(weight="fednova")])
def test_methods_that_cannot_do_it_refuse_it(options: EveryStep | Streaming) -> None:
    with pytest.raises(ConfigError, match="one of tokens, equal"):
        options.build()


def test_unknown_weights_are_refused_with_what_there_is() -> None:
    with pytest.raises(ConfigError, match="tokens, equal, fednova"):
        Average(weight="fednov").build()
