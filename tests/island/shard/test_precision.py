"""Half precision: close to fp32, and a step that overflows somewhere is taken nowhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn

from atoll.errors import ConfigError, LossNotFinite
from atoll.strategies.inner.gather_scatter import local_of
from atoll.strategies.inner.gradient_norm import GradientNorm
from atoll.strategies.inner.local import Local, language_model_loss
from atoll.strategies.inner.options import InnerOptions
from atoll.strategies.inner.precision import FIRST_SCALE, GOOD_STEPS, Scaler, check_precision
from atoll.strategies.outer.base import OuterDefaults
from atoll.task import Task
from tests.island.pool import Ranks
from tests.island.reference import CPU, batch_for, divided, gpt, gradients, perceptron, spread
from tests.island.test_built_in_models import _model_and_batch

dist: Any = torch.distributed


def test_the_scale_follows_what_happens() -> None:
    scaler = Scaler("fp16")
    assert scaler.scale == FIRST_SCALE == 65536
    assert all(scaler.update(finite=True) for _ in range(GOOD_STEPS - 1))
    assert scaler.scale == FIRST_SCALE
    assert scaler.update(finite=True)
    assert scaler.scale == 2 * FIRST_SCALE
    scaler.update(finite=True)
    assert not scaler.update(finite=False)
    assert (scaler.scale, scaler.good_steps) == (FIRST_SCALE, 0)


def test_a_scaler_goes_on_where_another_stood() -> None:
    first, second = Scaler("fp16"), Scaler("fp16")
    first.update(finite=False)
    first.update(finite=True)
    second.load_state_dict(first.state_dict())
    assert (second.scale, second.good_steps) == (FIRST_SCALE / 2, 1)
    assert not second.exhausted
    while not second.exhausted:
        second.update(finite=False)
    assert second.scale == 2.0**-15


@pytest.mark.parametrize(
    "state",
    [
        {"scale": math.inf, "good_steps": 0}, {"scale": 0.0, "good_steps": 0},
        {"scale": 3.0, "good_steps": 0}, {"scale": math.nan, "good_steps": 0},
        {"scale": 2.0, "good_steps": -1}, {"scale": 2.0, "good_steps": GOOD_STEPS},
    ],
    ids=str,
)  # fmt: skip
def test_a_scaler_takes_up_nothing_that_none_has(state: dict[str, float]) -> None:
    scaler = Scaler("fp16")
    with pytest.raises(ValueError, match=r"scale"):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == Scaler("fp16").state_dict()


@pytest.mark.parametrize("word", ["fp32", "bf16"])
def test_other_precisions_have_no_scale(word: str) -> None:
    scaler, gradient = Scaler(word), torch.ones(3)
    scaler.unscale([gradient])
    assert scaler.update(finite=False)
    scaler.load_state_dict({"scale": 4.0, "good_steps": 1.0})
    assert scaler.scale == 1.0
    assert scaler.state_dict() == {}
    assert torch.equal(gradient, torch.ones(3))


def test_taking_the_scale_out_is_exact() -> None:
    expected = torch.randn(100)
    gradient = expected * FIRST_SCALE
    Scaler("fp16").unscale([gradient])
    assert torch.equal(gradient, expected)


def test_a_device_that_cannot_compute_in_it_is_refused() -> None:
    check_precision("fp32", torch.device("meta"))
    check_precision("bf16", CPU)
    with pytest.raises(ConfigError, match="cannot compute in fp16") as caught:
        check_precision("fp16", torch.device("meta"))
    assert "bf16" in str(caught.value)
    with pytest.raises(ConfigError, match="unknown precision"):
        check_precision("fp12", CPU)


def _alike(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the cosine between two gradients of a whole model."""
    one = torch.cat([found[name].flatten() for name in expected])
    other = torch.cat([gradient.flatten() for gradient in expected.values()])
    return float(nn.functional.cosine_similarity(one, other, dim=0))


@pytest.mark.parametrize("axes", [{"replicate": 2}, {"shard": 2}], ids=str)
@pytest.mark.parametrize("word", ["bf16", "fp16"])
@pytest.mark.every(3)
def test_half_precision_is_close_to_fp32(ranks: Ranks, axes: dict[str, int], word: str) -> None:
    expected_loss, expected, _ = ranks.run(2, spread, "gpt", axes, {}, True)[0]
    for loss, found, _ in ranks.run(2, spread, "gpt", axes, {"precision": word}, True):
        assert loss == pytest.approx(expected_loss, rel=0.01)
        assert loss != expected_loss
        assert {gradient.dtype for gradient in found.values()} == {torch.float32}
        assert _alike(found, expected) > 0.999


def _overflowing(axes: dict[str, int], bad: int) -> list[tuple[bool, dict[str, float]]]:
    """Do three steps; in the second one rank gets a number that is not finite."""
    model = gpt().float()
    parts, scaler = divided(model, axes, precision="fp16"), Scaler("fp16")
    norm, told = GradientNorm(parts), []
    for step in range(3):
        parts.backward(*batch_for(model), scale=scaler.scale)
        if step == 1 and dist.get_rank() == bad:
            gradient = next(iter(parts.parameters().values())).grad
            assert gradient is not None
            local_of(gradient).flatten()[0] = math.inf
        taken = scaler.update(finite=norm.measure().finite)
        told.append((taken, scaler.state_dict()))
    return told


@pytest.mark.parametrize(
    ("axes", "bad"),
    [({"replicate": 2}, 1), ({"shard": 2}, 1), ({"replicate": 2, "shard": 2}, 2)],
    ids=str,
)
@pytest.mark.every(3)
def test_an_overflow_on_one_rank_is_skipped_by_all(
    ranks: Ranks, axes: dict[str, int], bad: int
) -> None:
    found = ranks.run(math.prod(axes.values()), _overflowing, axes, bad)
    assert all(told == found[0] for told in found)
    assert [taken for taken, _ in found[0]] == [True, False, True]
    assert [state["scale"] for _, state in found[0]] == [65536, 32768, 32768]


class _Rates:
    """A schedule that counts its steps."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError  # nothing resumes here: a test that does is wrong


class _Watching(OuterDefaults):
    """Stays alone; counts rounds, and may say that others want to skip the step."""

    def __init__(self, *, skips: bool = False) -> None:
        self.rounds, self._skips = 0, skips

    def gradients(self, task: Task) -> None:
        task.skipped = self._skips

    def sync(self, task: Task) -> None:
        self.rounds += 1


def _task(model: nn.Module) -> Task:
    return Task(model, torch.optim.SGD(model.parameters(), lr=0.1), _Rates())


def _vector(task: Task) -> Tensor:
    return torch.cat([p.detach().flatten() for p in task.parameters()])


def _step(
    options: InnerOptions, *, model: Callable[[], nn.Module] = perceptron, rows: int = 8
) -> Tensor:
    task = _task(model())
    Local(language_model_loss, clip=0.5, options=options).step(
        task, batch_for(task.model, rows=rows), _watching()
    )
    return _vector(task)


def _watching(*, skips: bool = False) -> Any:
    return _Watching(skips=skips)


@pytest.mark.parametrize("words", [{"accumulate": 4}, {"accumulate": 2, "recompute": "full"}])
@pytest.mark.parametrize("model", [perceptron, gpt])
def test_one_process_may_compute_in_parts(
    words: dict[str, Any], model: Callable[[], nn.Module]
) -> None:
    whole, parts = _step(InnerOptions(), model=model), _step(InnerOptions(**words), model=model)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)
    with pytest.raises(ConfigError, match="multiple of"):
        _step(InnerOptions(**words), model=model, rows=7)


def test_one_process_computes_in_half_precision() -> None:
    def single() -> nn.Module:
        return gpt().float()

    whole = _step(InnerOptions(), model=single)
    for word in ("bf16", "fp16"):
        found = _step(InnerOptions(precision=word), model=single)
        assert not torch.equal(found, whole)
        torch.testing.assert_close(found, whole, rtol=0.02, atol=0.002)


def test_one_process_leaves_a_step_out_that_overflows() -> None:
    model = gpt().float()
    task, outer = _task(model), _watching()
    inner = Local(language_model_loss, options=InnerOptions(precision="fp16"))
    inputs, targets = batch_for(model)
    good = model.criterion

    def steep(outputs: Tensor, targets: Tensor) -> Tensor:
        return good(outputs, targets) * 1e35

    start = _vector(task)
    model.criterion = steep  # type: ignore[method-assign]
    inner.step(task, (inputs, targets), outer)
    assert task.overflowed
    assert torch.equal(_vector(task), start)
    model.criterion = good  # type: ignore[method-assign]
    result = inner.step(task, (inputs, targets), outer)
    assert not task.overflowed
    assert not torch.equal(_vector(task), start)
    assert math.isfinite(result.grad_norm)
    assert inner.scaler.scale == FIRST_SCALE / 2
    assert (task.step, outer.rounds) == (2, 2)
    assert isinstance(task.scheduler, _Rates)
    assert task.scheduler.steps == 1


def test_one_process_skips_what_others_skip() -> None:
    task = _task(gpt().float())
    inner = Local(language_model_loss, options=InnerOptions(precision="fp16"))
    start = _vector(task)
    inner.step(task, batch_for(task.model), _watching(skips=True))
    assert torch.equal(_vector(task), start)
    assert inner.scaler.scale == FIRST_SCALE / 2


def test_a_loss_that_no_scale_saves_is_refused() -> None:
    task = _task(gpt().float())
    inner = Local(language_model_loss, options=InnerOptions(precision="fp16"))
    with torch.no_grad():
        task.parameters()[0].fill_(math.nan)
    batch, outer = batch_for(task.model), _watching()
    for _ in range(30):
        inner.step(task, batch, outer)
    with pytest.raises(LossNotFinite, match="the loss is not finite"):
        inner.step(task, batch, outer)
    assert task.step == 30


# ------------------------------------------------------------ what sharded models gather in half


def _gathered(name: str, axes: dict[str, int], words: dict[str, Any]) -> Any:
    """Return how many bytes a step gathers, its loss and gradients, and types of what is kept."""
    model, inputs, targets = _model_and_batch(name)
    parts, sent = divided(model.float(), axes, **words), []
    gather = dist.all_gather_into_tensor

    def counted(output_tensor: Tensor, *given: Any, **named: Any) -> Any:
        sent.append(output_tensor.nbytes)
        return gather(output_tensor, *given, **named)

    dist.all_gather_into_tensor = counted
    inputs = inputs.float() if inputs.is_floating_point() else inputs
    loss = float(parts.backward(inputs, targets))
    dist.all_gather_into_tensor = gather
    kept = {t.dtype for p in parts.parameters().values() for t in (p, p.grad) if t is not None}
    return sum(sent), loss, gradients(parts), kept


@pytest.mark.parametrize(
    ("name", "axes"),
    [("llama", {"shard": 2}), ("resnet", {"shard": 2}), ("gpt2", {"shard": 2, "tensor": 2})],
    ids=str,
)
@pytest.mark.every(2)
def test_shards_are_gathered_in_half_precision(
    ranks: Ranks, name: str, axes: dict[str, int]
) -> None:
    count = math.prod(axes.values())
    words = {"accumulate": 2, "recompute": "full"}
    whole, whole_loss, expected, _ = ranks.run(count, _gathered, name, axes, words)[0]
    for word in ("bf16", "fp16"):
        told = ranks.run(count, _gathered, name, axes, {**words, "precision": word})
        half, loss, found, kept = told[0]
        assert half == whole / 2
        assert kept == {torch.float32}, "masters and their gradients"
        assert loss == pytest.approx(whole_loss, rel=0.01)
        assert _alike(found, expected) > 0.999
        assert all(other[1] == loss for other in told)
