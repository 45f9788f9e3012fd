"""A residual stream in a subspace: basis, projections and boundary, in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.config import parse_spec
from atoll.errors import ConfigError
from atoll.models.gpt import GPT, GPTConfig
from atoll.models.llama import Llama, LlamaConfig
from atoll.strategies.inner.options import ActivationFormat
from atoll.strategies.inner.pipeline.subspace import (
    SEED,
    TABLE_STD,
    Constraint,
    Subspace,
    TokenBoundary,
    check_confined,
    enlarge_table,
    residual_stream,
)
from atoll.train.build import whole_model
from tests.island.reference import VOCAB, assert_same, batch_for, gpt, perceptron

Model = GPT | Llama


def _llama() -> Llama:
    torch.manual_seed(4)
    return Llama(LlamaConfig(vocab_size=VOCAB, width=16, heads=2, context=6, tie=False)).double()


MODELS: dict[str, Callable[[], Model]] = {"gpt": lambda: gpt(tie=False), "llama": _llama}


def _confined(model: Model, size: int) -> tuple[Constraint, TokenBoundary]:
    """Confine all of a model but its last block, as if it were cut before that one."""
    subspace = Subspace.drawn(16, size, seed=3)
    table = subspace.outside(model.embedding.weight.detach())
    last = f"blocks.{len(model.blocks) - 1}."
    sending = {n: p for n, p in model.named_parameters() if not n.startswith(last)}
    constraint = Constraint.of(sending, residual_stream(model), subspace, table)
    constraint.project()
    return constraint, TokenBoundary(subspace, table)


def _cut(model: Model, boundary: TokenBoundary, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of a model whose last block is behind a boundary, and what it got."""
    x = ids
    for unit in model.units()[:-3]:
        x = unit(x)
    x = received = boundary.unpack(boundary.pack(x, ids), ids)
    for unit in model.units()[-3:]:
        x = unit(x)
    return x, received


def _gram(subspace: Subspace) -> Tensor:
    return (subspace.basis.T @ subspace.basis).float()


@pytest.mark.parametrize("size", [1, 5, 16])
def test_bases_are_orthonormal_and_equal_each_time(size: int) -> None:
    drawn = Subspace.drawn(16, size, seed=3)
    torch.testing.assert_close(_gram(drawn), torch.eye(size), atol=1e-6, rtol=0)
    assert torch.equal(drawn.basis, Subspace.drawn(16, size, seed=3).basis)
    if size < 16:
        assert not torch.equal(drawn.basis, Subspace.drawn(16, size, seed=4).basis)


def test_the_whole_space_changes_no_bit() -> None:
    model, x = gpt(tie=False), torch.randn(2, 6, 16, dtype=torch.float64)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    constraint, boundary = _confined(model, 16)
    constraint.project()
    ids = torch.zeros(2, 6, dtype=torch.int64)
    assert torch.equal(boundary.unpack(boundary.pack(x, ids), ids), x)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_new_gpt_computes_the_same_in_any_subspace() -> None:
    torch.manual_seed(2)
    model = GPT(GPTConfig(vocab_size=VOCAB, width=16, heads=2, context=6, tie=False))
    ids, _ = batch_for(model)
    before = model(ids)
    _, boundary = _confined(model, 2)
    found, _ = _cut(model, boundary, ids)
    torch.testing.assert_close(found, before, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_without_a_boundary(name: str) -> None:
    model = MODELS[name]()
    constraint, boundary = _confined(model, 5)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB, (4, 6), generator=generator)
    found: list[dict[str, Tensor]] = []
    for outputs in (model(ids), _cut(model, boundary, ids)[0]):
        model.zero_grad()
        model.criterion(outputs, ids.roll(1, 1)).backward()  # type: ignore[no-untyped-call]
        constraint.project_gradients()
        found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert_same(found[1], found[0])


def test_activations_come_back_exactly_after_1000_steps() -> None:
    torch.manual_seed(2)
    model = GPT(GPTConfig(vocab_size=VOCAB, width=16, heads=2, context=6, tie=False))
    constraint, boundary = _confined(model, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(1000):
        ids, targets = batch_for(model, rows=2, seed=step % 7)
        optimizer.zero_grad()
        outputs, _ = _cut(model, boundary, ids)
        model.criterion(outputs, targets).backward()  # type: ignore[no-untyped-call]
        constraint.project_gradients()
        with constraint.in_coordinates():
            optimizer.step()
    x = model.units()[2](model.embedding(ids))
    received = boundary.unpack(boundary.pack(x, ids), ids)
    assert float(((received - x).norm() / x.norm()).detach()) <= 1e-6
    for weight in map(torch.Tensor.detach, constraint.writers):
        assert float(constraint.subspace.outside(weight.T).norm() / weight.norm()) < 1e-6
    assert (
        float(model.get_parameter("blocks.1.down.weight").detach().norm()) > 1.0
    )  # free to write anywhere
    assert len(constraint.writers) == 2


@pytest.mark.parametrize("size", [5, 16])
def test_optimizers_step_on_coordinates(size: int) -> None:
    torch.manual_seed(6)
    subspace = Subspace.drawn(16, size, seed=3)
    weight, embedding = (nn.Parameter(torch.randn(16, 7)), nn.Parameter(torch.randn(9, 16)))
    table = subspace.outside(embedding.detach())
    constraint = Constraint(subspace, [weight], embedding, table)
    constraint.project()
    basis = subspace.of(weight)
    plain = [nn.Parameter((basis.T @ weight).detach()), nn.Parameter((embedding @ basis).detach())]
    kind = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1)
    optimizer, expected = kind([weight, embedding]), kind(plain)
    for _ in range(3):
        weight.grad, embedding.grad = torch.randn(16, 7), torch.randn(9, 16)
        plain[0].grad, plain[1].grad = basis.T @ weight.grad, embedding.grad @ basis
        constraint.project_gradients()
        with constraint.in_coordinates():
            optimizer.step()
        expected.step()
    torch.testing.assert_close(weight, basis @ plain[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(embedding, plain[1] @ basis.T + table, atol=1e-5, rtol=1e-5)


def test_an_error_in_a_step_does_not_leave_coordinates() -> None:
    subspace, weight = Subspace.drawn(16, 5, seed=3), nn.Parameter(torch.randn(16, 7))
    constraint = Constraint(subspace, [weight], None, None)
    constraint.project()
    before = weight.detach().clone()
    with pytest.raises(MemoryError), constraint.in_coordinates():
        raise MemoryError
    torch.testing.assert_close(weight.detach(), before)


def test_settling_moves_only_what_is_outside() -> None:
    model = gpt(tie=False)
    constraint, _ = _confined(model, 5)
    before = [weight.detach().clone() for weight in constraint.writers]
    constraint.settle()
    assert all(torch.equal(w, old) for w, old in zip(constraint.writers, before, strict=True))
    with torch.no_grad():
        constraint.writers[0].add_(0.1)
    constraint.settle()
    outside = constraint.subspace.outside(constraint.writers[0].detach().T)
    assert float(outside.norm()) < 1e-6


def test_muon_stays_in_the_subspace() -> None:
    torch.manual_seed(6)
    subspace = Subspace.drawn(16, 5, seed=3)
    weight = nn.Parameter(torch.randn(16, 7))
    constraint = Constraint(subspace, [weight], None, None)
    optimizer: Any = torch.optim.Muon([weight], lr=0.1)
    before = subspace.columns(weight.detach())
    for _ in range(3):
        weight.grad = torch.randn(16, 7)
        with constraint.in_coordinates():
            optimizer.step()
    assert float(subspace.outside(weight.detach().T).norm()) < 1e-4
    assert float((weight.detach() - before).norm()) > 0.1


def test_a_refreshed_subspace_contains_more_of_the_gradients() -> None:
    generator = torch.Generator().manual_seed(5)
    gradients = torch.randn(200, 16, generator=generator) * torch.linspace(0.1, 3, 16)
    energy = gradients.T @ gradients
    now = Subspace.drawn(16, 4, seed=3)
    kept = float(now.rows(gradients).square().sum() / energy.trace())
    for _ in range(100):
        drift = energy.double() @ now.basis
        now = now.refreshed(drift, total=energy.trace(), rate=5.0)
        torch.testing.assert_close(_gram(now), torch.eye(4), atol=1e-6, rtol=0)
        more = float(now.rows(gradients).square().sum() / energy.trace())
        assert more >= kept - 1e-6
        kept = more
    best = float(torch.linalg.eigvalsh(energy)[-4:].sum() / energy.trace())
    assert kept == pytest.approx(best, rel=0.02)


class _Biased(GPT):
    def __init__(self) -> None:
        super().__init__(GPTConfig(tie=False))
        self.blocks[0].down = nn.Linear(256, 64)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: gpt(), "shares the embedding"),
        (lambda: gpt(tie=False, dropout=0.1), "dropout leaves"),
        (_Biased, "biases leave"),
        (perceptron, "does not name what writes"),
    ],
)
def test_models_that_leave_every_subspace_are_refused(
    model: Callable[[], nn.Module], reason: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{reason}[\s\S]*tie = false"):
        residual_stream(model())


@pytest.mark.parametrize("spec", ["subspace:", "subspace:0", "subspace:x", "subspace:-1"])
def test_subspaces_need_a_number_of_dimensions(spec: str) -> None:
    with pytest.raises(ConfigError, match="without dimensions"):
        ActivationFormat.of(spec)


def test_a_subspace_must_fit_the_width() -> None:
    with pytest.raises(ConfigError, match=r"1 to 16[\s\S]*subspace:1"):
        check_confined(gpt(tie=False), 17)


def test_only_the_table_of_a_new_model_is_enlarged() -> None:
    model, before = gpt(tie=False), gpt(tie=False)
    enlarge_table(model, 5)
    subspace = Subspace.drawn(16, 5, seed=SEED)
    weight, old = (m.embedding.weight.detach() for m in (model, before))
    table = subspace.outside(weight)
    assert float(table.square().sum() / (len(table) * 11)) == pytest.approx(TABLE_STD**2)
    torch.testing.assert_close(subspace.rows(weight), subspace.rows(old), atol=1e-6, rtol=1e-6)
    others = dict(before.named_parameters())
    del others["embedding.weight"]
    assert all(torch.equal(model.get_parameter(name), p) for name, p in others.items())


def test_the_table_of_the_whole_space_is_not_enlarged() -> None:
    model = gpt(tie=False)
    enlarge_table(model, 16)
    assert torch.equal(model.embedding.weight, gpt(tie=False).embedding.weight)


JOBS = {
    "pipeline": ('inner = "pipeline"', '[island]\nranks = 2\nactivations = "subspace:5|int6"'),
    "swarm": ('inner = "swarm"', '[swarm]\nstages = 2\ncodec = "subspace:5"'),
}


@pytest.mark.parametrize("name", JOBS)
def test_jobs_in_a_subspace_start_with_a_large_table(name: str) -> None:
    inner, more = JOBS[name]
    model = '[model]\nname = "gpt"\nwidth = 16\nheads = 2\ntie = false'
    built: Any = whole_model(parse_spec(f"{model}\n[strategy]\n{inner}\n{more}\n"))
    table = Subspace.drawn(16, 5, seed=SEED).outside(built.embedding.weight.detach())
    assert float(table.square().sum() / (len(table) * 11)) == pytest.approx(TABLE_STD**2, rel=0.01)
