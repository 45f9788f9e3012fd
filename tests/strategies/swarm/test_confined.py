"""Stages of a SWARM whose activations are in a subspace."""

from __future__ import annotations

import pytest
import torch

from atoll.strategies.inner.swarm.activations import ActivationCodec
from atoll.strategies.inner.swarm.runner import MicrobatchKey
from atoll.strategies.inner.swarm.stage import StageCut
from tests.strategies.swarm.kit import batch_of, built, confined, means, plainly, runners, through

WIDTH, SIZE, LENGTH, ROWS = 16, 5, 8, 4
KEY = MicrobatchKey(0, 0)


@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize("stages", [2, 4])
def test_gradients_are_those_of_the_confined_model(name: str, stages: int) -> None:
    cut, batch = StageCut(stages=stages, size=SIZE), batch_of(name, 0, 0)
    whole = built(name)
    constraint = confined(whole, cut)
    loss, expected, _ = plainly(whole, [batch], rows=ROWS)
    for key, parameter in whole.named_parameters():
        parameter.grad = expected[key]
    constraint.project_gradients()
    path, others = runners(name, cut=cut), runners(name, cut=cut)
    assert through(path, KEY, batch, back=others) == pytest.approx(loss, rel=1e-6)
    for runner in (*others[:-1], path[-1]):
        runner.fold(KEY)
    found = means([*others[:-1], path[-1]])
    for runner in others[:-1]:
        runner.stage.constrain_gradients()
    assert set(found) == set(expected)
    for key, parameter in whole.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[key], parameter.grad, atol=1e-5, rtol=1e-3)


def test_a_subspace_of_full_width_is_the_model_bitwise() -> None:
    batch = batch_of("gpt", 0, 0)
    loss, expected, _ = plainly(built("gpt"), [batch], rows=ROWS)
    path = runners("gpt", cut=StageCut(stages=3, size=WIDTH))
    assert through(path, KEY, batch) == loss
    for runner in path:
        runner.fold(KEY)
    for key, gradient in means(path).items():
        assert torch.equal(gradient, expected[key]), key


def test_stages_exchange_and_keep_a_few_numbers_per_token() -> None:
    batch = batch_of("gpt", 0, 0)
    first, last = runners("gpt", cut=StageCut(stages=2, size=SIZE))
    for runner in (first, last):
        runner.stage.enter(batch[0])
    values = first.forward(KEY, (batch[0],))
    assert [tuple(value.shape) for value in values] == [(ROWS, LENGTH, SIZE)]
    heads, data = ActivationCodec(f"subspace:{SIZE}").encode(values)
    assert sum(len(part) for part in data) == ROWS * LENGTH * SIZE * 4
    assert heads[0].codec == ""
    _, gradients = last.loss(KEY, values, batch[1])
    assert [g.shape for g in gradients if g is not None] == [values[0].shape]
    assert last.inputs(KEY)[0].shape == values[0].shape
    heads, data = ActivationCodec(f"subspace:{SIZE}|int8").encode(values)
    assert heads[0].codec.startswith("int8")
