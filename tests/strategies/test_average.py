from __future__ import annotations

import torch
from torch import Tensor

from atoll.group.group import Group
from atoll.group.memory import MemoryGroups
from atoll.strategies.outer.average import Average
from atoll.strategies.outer.every_step import EveryStep
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
