"""Gradients of sparse embeddings, in the methods that combine gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.group.single import SingleGroup
from atoll.run import Run
from atoll.run.place import Membership
from atoll.strategies.vectors.gradients import Gradients, dense_gradient
from atoll.task import Task

ROWS, STEPS = 7, 5


class Bag(nn.Module):
    """Scores of words: an embedding, and one matrix."""

    def __init__(self, *, sparse: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, 3, sparse=sparse)
        self.out = nn.Linear(3, 1)
        with torch.no_grad():
            for parameter in self.parameters():  # members run in threads that share a generator
                parameter.copy_(torch.linspace(-1.0, 1.0, parameter.numel()).view_as(parameter))

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.out(self.words(rows)).square().mean()
        return found


class SparseAndDense(torch.optim.Optimizer):
    """SparseAdam for the embedding, SGD for the rest: as one optimizer."""

    def __init__(self, model: Bag) -> None:
        self.both: list[torch.optim.Optimizer] = [
            torch.optim.SparseAdam(model.words.parameters(), lr=0.1),
            torch.optim.SGD(model.out.parameters(), lr=0.1),
        ]
        super().__init__(model.parameters(), {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        for one in self.both:
            one.step()


def rows_of(slot: int, step: int) -> Tensor:
    return torch.tensor([(slot * 3 + step) % ROWS, (slot + step) % ROWS])


def sgd(model: Bag) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(optimizer: Any, model: Bag, *, slot: int = 0, scaler: GradScaler | None = None) -> Tensor:
    scaler = scaler or GradScaler("cpu", enabled=False)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(model(rows_of(slot, step))).backward()
        scaler.step(optimizer)
        scaler.update()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def together(folder: Path, outer: Any, kind: Any, *, sparse: bool = True) -> list[Tensor]:
    def body(group: Group) -> Tensor:
        slot = int(group.me[1:])
        with Run(group, Membership(folder, slot=slot, num_slots=2)) as run:
            model = Bag(sparse=sparse)
            return train(run.wrap(model, kind(model), outer=outer), model, slot=slot)

    return MemoryGroups(2).together(body)


@pytest.mark.parametrize("outer", ["ddp", "powersgd", "signsgd"])
def test_members_with_sparse_gradients_end_as_with_dense_ones(tmp_path: Path, outer: str) -> None:
    first, second = together(tmp_path, outer, sgd)
    assert torch.equal(first, second)
    assert torch.equal(first, together(tmp_path, outer, sgd, sparse=False)[0])


def test_sparse_adam_on_two_members_ends_with_one_model(tmp_path: Path) -> None:
    first, second = together(tmp_path, "ddp", SparseAndDense)
    assert torch.equal(first, second)
    assert not torch.equal(first, together(tmp_path, "alone", SparseAndDense)[0])


@pytest.mark.parametrize("scaled", [False, True])
def test_one_member_with_sparse_adam_equals_the_plain_loop(tmp_path: Path, scaled: bool) -> None:
    plain, ours = Bag(), Bag()
    wrapped = Run(SingleGroup(), Membership(tmp_path)).wrap(ours, SparseAndDense(ours), outer="ddp")
    scaler = GradScaler("cpu", init_scale=2.0**8, enabled=scaled)
    assert torch.equal(train(SparseAndDense(plain), plain), train(wrapped, ours, scaler=scaler))


def test_no_gradient_is_a_sparse_one_for_a_sparse_embedding() -> None:
    model = Bag()
    gradients = Gradients(Task(model, sgd(model)))
    model.out.weight.grad = torch.ones_like(model.out.weight)
    assert [g.layout for g in gradients.dense()] == [torch.strided] * 3
    gradients.restore_layout()
    found = model.words.weight.grad
    assert found is not None
    assert found.is_sparse
    assert found._nnz() == 0
    assert model.out.weight.grad.layout == torch.strided


def test_a_dense_gradient_of_a_tied_embedding_stays_dense() -> None:
    model = Bag()
    gradients = Gradients(Task(model, sgd(model)))
    model.words.weight.grad = torch.ones_like(model.words.weight)
    gradients.dense()
    gradients.restore_layout()
    assert model.words.weight.grad.layout == torch.strided


def test_a_single_gradient_is_read_dense() -> None:
    model = Bag()
    assert torch.equal(dense_gradient(model.words.weight), torch.zeros(ROWS, 3))
    model(torch.tensor([1])).backward()
    assert dense_gradient(model.words.weight).layout == torch.strided
    assert int(dense_gradient(model.words.weight).any(1).sum()) == 1
