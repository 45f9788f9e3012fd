"""Stages in processes of their own compute what the whole model does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.errors import ConfigError, LossNotFinite, PeerRefused
from atoll.models import build_model
from atoll.strategies.inner.swarm.runner import MicrobatchKey, StageRunner
from atoll.strategies.inner.swarm.stage import ModelStage, StageCut, cuts_of
from tests.strategies.swarm.kit import (
    MODELS,
    Layers,
    batch_of,
    built,
    means,
    plainly,
    runners,
    through,
)

COUNT, ROWS = 3, 4


def keys(step: int = 0) -> list[MicrobatchKey]:
    return [MicrobatchKey(step, index) for index in range(COUNT)]


def assert_bitwise(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_one_peer_per_stage_is_the_whole_model_bitwise(name: str, stages: int) -> None:
    path = runners(name, cut=StageCut(stages=stages))
    batches = [batch_of(name, 0, index) for index in range(COUNT)]
    loss, expected, buffers = plainly(built(name), batches, rows=ROWS)
    for key, batch in zip(keys(), batches, strict=True):
        through(path, key, batch)
        for runner in path:
            runner.fold(key)
    found = means(path)
    assert_bitwise(found, expected)
    own = {n: b for runner in path for n, b in runner.stage.buffers().items()}
    counts = {n: b for runner in path for n, b in runner.stage.untrained().items()}
    assert_bitwise(own | counts, {n: b for n, b in buffers.items() if n in own | counts})
    if name == "layers":
        assert len(own) == 4
        assert len(counts) == 2
    last = path[-1].gradient()[1]
    assert last.rows == ROWS * COUNT
    assert last.loss == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize("name", ["gpt", "layers"])
def test_a_run_of_stages_is_a_run_of_the_whole_model(name: str) -> None:
    whole = built(name)
    path = runners(name, cut=StageCut(stages=3))
    rates: dict[str, Any] = {"lr": 0.01, "foreach": False}
    optimizer = torch.optim.AdamW(whole.parameters(), **rates)
    own = [torch.optim.AdamW(r.stage.parameters().values(), **rates) for r in path]
    for step in range(3):
        batches = [batch_of(name, step, index) for index in range(COUNT)]
        _, expected, buffers = plainly(whole, batches, rows=ROWS)
        with torch.no_grad():
            for key, parameter in whole.named_parameters():
                parameter.grad = expected[key]
            for key, buffer in whole.named_buffers():
                buffer.copy_(buffers[key])
        optimizer.step()
        for key, batch in zip(keys(step), batches, strict=True):
            through(path, key, batch)
            for runner in path:
                runner.fold(key)
        means(path)
        for runner, one in zip(path, own, strict=True):
            one.step()
            runner.begin(step + 1)
    found = {n: p for runner in path for n, p in runner.stage.parameters().items()}
    assert_bitwise(found, dict(whole.named_parameters()))


def noisy(name: str) -> Any:
    torch.manual_seed(3)
    if name == "layers":
        return Layers(dropout=0.4)
    return build_model("gpt", layers=4, width=16, heads=2, context=8, vocab_size=18, tie=False,
                       dropout=0.4)  # fmt: skip


@pytest.mark.parametrize("name", ["gpt", "layers"])
def test_backward_on_another_peer_repeats_the_forward_pass(name: str) -> None:
    cut = StageCut(stages=3)
    calm, path, others = (runners(name, cut=cut, model=noisy) for _ in range(3))
    for key in keys():
        batch = batch_of(name, key.step, key.index)
        torch.manual_seed(key.index)  # the state of the process does not matter
        expected = through(calm, key, batch)
        torch.manual_seed(99)
        back = [*others[:-1], path[-1]]
        assert through(path, key, batch, back=back) == expected
        for runner in (*calm, *back):
            runner.fold(key)
        for runner in path[:-1]:
            runner.drop(key)
            assert not runner.held
    assert_bitwise(means([*others[:-1], path[-1]]), means(calm))


def test_a_second_forward_pass_gives_the_same_outputs() -> None:
    first, again = (runners("layers", cut=StageCut(stages=2), model=noisy)[0] for _ in range(2))
    key, inputs = MicrobatchKey(0, 1), batch_of("layers", 0, 1)[0]
    (one,), (two,), (three,) = (r.forward(key, (inputs,)) for r in (first, again, again))
    assert torch.equal(one, two)
    assert torch.equal(two, three)
    (other,) = again.forward(MicrobatchKey(0, 2), (inputs,))
    assert not torch.equal(one, other)


def test_a_stage_may_begin_with_an_overwriting_layer() -> None:
    path = runners("layers", cut=StageCut(stages=2, cuts=(2,)))
    batch, key = batch_of("layers", 0, 0), keys()[0]
    _, expected, _ = plainly(built("layers"), [batch], rows=ROWS)
    through(path, key, batch)
    for runner in path:
        runner.fold(key)
    assert_bitwise(means(path), expected)


def test_only_what_is_folded_counts_whatever_the_order() -> None:
    path, other = (runners("gpt", cut=StageCut(stages=2)) for _ in range(2))
    for key in keys():
        through(path, key, batch_of("gpt", key.step, key.index))
        through(path, replace(key, lease=9), batch_of("gpt", key.step, key.index))  # leased again
    for key in reversed(keys()):
        through(other, key, batch_of("gpt", key.step, key.index))
    for key in keys():
        for runner in path:
            runner.fold(key)
            runner.release(key)
            runner.drop(replace(key, lease=9))
    for key in reversed(keys()):
        for runner in other:
            runner.fold(key)
    assert not path[0].held
    found, expected = means(path), means(other)
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, rtol=1e-7, atol=0), name


def test_a_pass_that_does_not_count_leaves_nothing() -> None:
    path = runners("gpt", cut=StageCut(stages=2))
    key, (inputs, targets) = MicrobatchKey(0, 0), batch_of("gpt", 0, 0)
    values = path[0].forward(key, (inputs,))
    _, gradients = path[1].loss(key, values, targets, counted=False)
    assert gradients[0] is not None
    with pytest.raises(PeerRefused, match="no pending gradients"):
        path[1].fold(key)
    assert path[0].backward(key, gradients) == (None,)  # token ids have no gradient
    path[0].fold(key)
    assert path[0].gradient()[1].rows == ROWS
    assert path[1].gradient()[1].rows == 0
    assert not path[1].gradient()[0].any()


def test_held_bytes_are_bounded_and_are_freed() -> None:
    runner = runners("gpt", cut=StageCut(stages=2), most=4)[0]
    inputs = batch_of("gpt", 0, 0)[0]
    size = sum(p.nbytes for p in runner.stage.parameters().values())
    for index in range(4):
        (values,) = runner.forward(MicrobatchKey(0, index), (inputs,))
    assert runner.held_bytes == 4 * inputs.nbytes
    with pytest.raises(PeerRefused, match="holds as many microbatches as it may"):
        runner.forward(MicrobatchKey(0, 4), (inputs,))
    key = MicrobatchKey(0, 0)
    runner.backward(key, (torch.ones_like(values),))
    assert runner.held_bytes == 4 * inputs.nbytes + size
    runner.release(key)
    assert runner.held_bytes == 3 * inputs.nbytes + size
    runner.fold(key)
    runner.release(MicrobatchKey(0, 1))  # it never came back
    assert runner.held_bytes == 2 * inputs.nbytes
    runner.begin(1)
    assert runner.held_bytes == 0


def test_what_does_not_fit_is_refused() -> None:
    first, last = runners("gpt", cut=StageCut(stages=2))
    key, (inputs, targets) = MicrobatchKey(0, 0), batch_of("gpt", 0, 0)
    (values,) = first.forward(key, (inputs,))
    for gradients in ((), (None, None), (torch.ones(1, 2),)):
        with pytest.raises(PeerRefused, match="do not fit what the stage puts out"):
            first.backward(key, gradients)
    with pytest.raises(PeerRefused, match="of another step"):
        first.forward(MicrobatchKey(1, 0), (inputs,))
    with pytest.raises(PeerRefused, match="does not hold the microbatch"):
        first.backward(MicrobatchKey(0, 1), (values,))
    with pytest.raises(PeerRefused, match="have no rows, or not the same number"):
        last.loss(key, (values, values[:1]), targets)
    with pytest.raises(LossNotFinite, match="dropped"):
        last.loss(key, (values * float("nan"),), targets)
    assert not last.held


def test_stages_compute_in_half_precision() -> None:
    batch = batch_of("gpt", 0, 0)
    key = MicrobatchKey(0, 0)
    _, expected, _ = plainly(built("gpt"), [batch], rows=ROWS)
    path = runners("gpt", cut=StageCut(stages=2, precision="bf16"))
    through(path, key, batch)
    for runner in path:
        runner.fold(key)
    for name, gradient in means(path).items():
        assert gradient.dtype is torch.float32
        assert 0 < (gradient - expected[name]).norm() < 0.1 * expected[name].norm(), name


class _Crossed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.after, self.before = nn.Linear(4, 2), nn.Linear(6, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.after(self.before(inputs))
        return found

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean()


def test_what_cannot_be_cut_names_what_can() -> None:
    with pytest.raises(ConfigError, match="stages = 7"):
        cuts_of(built("gpt"), StageCut(stages=9))
    with pytest.raises(ConfigError, match="rising numbers"):
        cuts_of(built("gpt"), StageCut(stages=3, cuts=(1,)))
    tied: Any = build_model("gpt", layers=2, width=16, heads=2, context=8, vocab_size=18)
    with pytest.raises(ConfigError, match=r"embedding.weight on stages 0 and 1.*tie = false"):
        ModelStage(tied, 0, StageCut(stages=2))
    with pytest.raises(ConfigError, match="loss scale"):
        ModelStage(built("gpt"), 0, StageCut(stages=2, precision="fp16"))
    with pytest.raises(ConfigError, match="not applied one after the other"):
        cuts_of(_Crossed(), StageCut(stages=2), sample=torch.ones(2, 6))
    assert StageRunner(ModelStage(tied, 0, StageCut(stages=1)), seed=0).stage.last


def test_a_microbatch_without_rows_is_refused() -> None:
    runner = runners("layers", cut=StageCut(stages=2))[0]
    rows = batch_of("layers", 0, 0)[0]
    with pytest.raises(PeerRefused, match="no rows"):
        runner.forward(MicrobatchKey(0, 0), (rows[:0],))


class _Turning(nn.Module):
    """Layers between which a complex buffer counts the rows of each pass."""

    phase: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))

    def forward(self, inputs: Tensor) -> Tensor:
        self.phase += torch.complex(inputs.detach().mean(), torch.tensor(1.0))
        found: Tensor = self.layer(inputs)
        return found


class _Phased(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(_Turning(), nn.Linear(6, 3))

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean()


def test_changes_of_complex_buffers_are_averaged() -> None:
    runner = runners("layers", cut=StageCut(stages=1), model=lambda _: _Phased())[0]
    batches = [batch_of("layers", 0, index) for index in range(COUNT)]
    for key, (inputs, targets) in zip(keys(), batches, strict=True):
        runner.loss(key, (inputs,), targets)
        runner.fold(key)
    runner.apply(runner.gradient()[0])
    mean = torch.stack([inputs.mean() for inputs, _ in batches]).mean()
    (found,) = runner.stage.buffers().values()
    assert torch.allclose(found, torch.complex(mean, torch.tensor(1.0)))
    assert torch.equal(runner.steady_buffers()["0.phase"], torch.zeros(2, dtype=torch.complex64))
