"""A step over an island is the step of one process, whatever the mesh."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from atoll.config import TrainTable
from atoll.errors import ConfigError, LossNotFinite
from atoll.strategies.inner.divide import split_model
from atoll.strategies.inner.gather_scatter import local_of
from atoll.strategies.inner.worker import SEED, Worker
from tests.island.leading import STEPS, Member, by_itself, led, same, table
from tests.island.pool import Ranks
from tests.island.reference import batch_for

Run = tuple[list[tuple[float, float]], dict[str, Tensor]]


def trained(member: Member) -> Run:
    return member.train(), member.parameters()


def _run(name: str, train: TrainTable, axes: dict[str, int], words: dict[str, Any]) -> Any:
    return led(trained, name, train, axes, **words)


def assert_equal(found: Run, expected: Run) -> None:
    for (loss, norm), (loss_expected, norm_expected) in zip(found[0], expected[0], strict=True):
        assert math.isclose(loss, loss_expected, rel_tol=1e-10)
        assert math.isclose(norm, norm_expected, rel_tol=1e-10)
    same(found[1], expected[1], within=1e-10)


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"replicate": 2}, {}),
        ({"replicate": 2}, {"accumulate": 2, "recompute": "full"}),
        ({"shard": 2}, {}),
        ({"shard": 4}, {"reshard": False}),
        ({"replicate": 2, "shard": 2}, {"accumulate": 2}),
        ({"pipeline": 2}, {}),
        ({"tensor": 2}, {}),
        ({"shard": 2, "tensor": 2}, {}),
        ({"replicate": 2, "tensor": 2}, {}),
        ({"replicate": 2, "pipeline": 2}, {}),
        ({"pipeline": 2, "tensor": 2}, {}),
    ],
    ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items()),
)
@pytest.mark.every(3)
def test_every_mesh_trains_like_one_process(
    ranks: Ranks, axes: dict[str, int], words: dict[str, Any]
) -> None:
    train = table()
    found = ranks.run(math.prod(axes.values()), _run, "even", train, axes, words)
    assert found[1:] == [None] * (len(found) - 1)
    assert_equal(found[0], trained(by_itself("even", train)))


@pytest.mark.parametrize("axes", [{"replicate": 2}, {"shard": 2}], ids=["ddp", "fsdp"])
def test_in_fp32_two_ranks_are_two_halves_of_a_batch_bit_for_bit(
    ranks: Ranks, axes: dict[str, int]
) -> None:
    """Where sums are in the same order; the factor that clips comes from sums in another one."""
    train = table(clip=0.0)
    found = ranks.run(2, _run, "single", train, axes, {})[0]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks: products of other numbers of threads round otherwise
    try:
        expected = trained(by_itself("single", train, accumulate=2))
    finally:
        torch.set_num_threads(threads)
    assert [x for x, _ in found[0]] == pytest.approx([x for x, _ in expected[0]], rel=1e-6)
    for name, tensor in expected[1].items():
        assert tensor.dtype == torch.float32
        assert torch.equal(found[1][name], tensor), name


@pytest.mark.parametrize("name", ["perceptron", "odd", "untied"])
@pytest.mark.every(3)
def test_models_of_any_kind_train_over_a_square(ranks: Ranks, name: str) -> None:
    """Without units or a plan, with frozen and unused parameters and a buffer."""
    found = ranks.run(4, _run, name, table(), {"replicate": 2, "shard": 2}, {})
    assert_equal(found[0], trained(by_itself(name, table())))


@pytest.mark.parametrize(
    "train",
    [
        table(optimizer="sgd", momentum=0.9, clip=0.0),
        table(optimizer="torch:Adagrad", options={"initial_accumulator_value": 0.1}),
        table(optimizer="torch:RMSprop", clip=0.0),
        table(optimizer="torch:NAdam"),
    ],
    ids=lambda train: str(train.optimizer),
)
@pytest.mark.every(2)
def test_optimizers_step_on_shards_as_on_the_whole(ranks: Ranks, train: TrainTable) -> None:
    found = ranks.run(2, _run, "perceptron", train, {"shard": 2}, {})
    assert_equal(found[0], trained(by_itself("perceptron", train)))


def test_muon_trains_copies(ranks: Ranks) -> None:
    train = table(optimizer="muon")
    found = ranks.run(2, _run, "gpt", train, {"replicate": 2}, {})
    expected = trained(by_itself("gpt", train))
    assert [loss for loss, _ in found[0][0]] == pytest.approx([loss for loss, _ in expected[0]])
    same(found[0][1], expected[1], within=1e-6)  # it orthogonalises in bfloat16


def _refused(train: TrainTable) -> str:
    with pytest.raises(ConfigError) as caught:
        led(trained, "gpt", train, {"shard": 2})
    return str(caught.value)


def test_whole_matrix_optimizers_are_refused_over_shards(ranks: Ranks) -> None:
    for told in ranks.run(2, _refused, table(optimizer="muon")):
        assert "needs whole parameters" in told
        assert 'inner = "ddp"' in told


def _left_out() -> Any:
    def use(member: Member) -> tuple[int, int]:
        inputs, targets = (each.clone() for each in batch_for(member.task.model))
        targets[:, ::2] = -100
        done = member.inner.step(member.task, (inputs, targets), member.outer)
        return done.tokens, int((targets != -100).sum())

    return led(use, "gpt", table(), {})


def test_targets_that_are_left_out_do_not_count(ranks: Ranks) -> None:
    counted, expected = ranks.run(1, _left_out)[0]
    assert counted == expected


# ------------------------------------------------------------------- what is not finite


class Poisoned:
    """Parts of which one rank's gradient becomes infinite at some steps."""

    def __init__(self, parts: Any, steps: set[int], rank: int) -> None:
        self._parts, self._steps, self._rank, self._done = parts, steps, rank, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parts, name)

    def backward(self, inputs: Tensor, targets: Tensor, **words: Any) -> Tensor:
        loss: Tensor = self._parts.backward(inputs, targets, **words)
        self._done += 1
        if dist.get_rank() == self._rank and self._done in self._steps:
            gradient = next(p.grad for p in self._parts.parameters().values() if p.numel())
            local_of(gradient)[...] = math.inf
        return loss


def _overflowing(axes: dict[str, int], precision: str, bad: set[int]) -> Any:
    """Return losses, rates, parameters before and after each step, and the scales of all ranks."""

    def divided(*args: Any, **words: Any) -> Poisoned:
        return Poisoned(split_model(*args, **words), bad, rank=dist.get_world_size() - 1)

    def use(member: Member) -> Any:
        found: list[Any] = []
        for step in range(1, STEPS + 1):
            before = member.parameters()
            rate = member.task.optimizer.param_groups[0]["lr"]
            try:
                loss = member.train(1, first=step)[0][0]
            except LossNotFinite as error:
                found.append(str(error))
                break
            after = member.parameters()
            moved = any(not torch.equal(before[name], after[name]) for name in before)
            task = member.task
            found.append((loss, rate, moved, task.step, task.overflowed))
        return found

    workers: list[Worker] = []
    found = led(use, "gpt", table(), axes, divided=divided, keep=workers, precision=precision)
    return found, workers[0].scaler.scale


@pytest.mark.parametrize("axes", [{"replicate": 2}, {"shard": 2}], ids=["ddp", "fsdp"])
def test_overflow_on_one_rank_skips_the_step_on_all(ranks: Ranks, axes: dict[str, int]) -> None:
    found = ranks.run(2, _overflowing, axes, "fp16", {2})
    assert [scale for _, scale in found] == [2.0**15] * 2
    steps = found[0][0]
    assert [moved for _, _, moved, _, _ in steps] == [True, False, True, True]
    assert [step for _, _, _, step, _ in steps] == [1, 2, 3, 4], "rounds count it"
    assert [overflowed for *_, overflowed in steps] == [False, True, False, False]
    rates = [rate for _, rate, *_ in steps]
    assert rates[1] == rates[2] > rates[0], "the schedule does not"


def test_a_gradient_that_is_not_finite_ends_the_island(ranks: Ranks) -> None:
    found = ranks.run(2, _overflowing, {"shard": 2}, "fp32", {3})
    steps = found[0][0]
    assert len(steps) == 3
    assert "the gradient is not finite; the update was refused on every rank" in steps[-1]
    assert "step 3" in steps[-1]


# ----------------------------------------------------------------------------- dropout


def _seeds(axes: dict[str, int]) -> int:
    """Return what torch was seeded with on this rank."""

    def use(member: Member) -> None:
        assert member.broadcaster is not None
        member.broadcaster.call(SEED, seed=5)

    led(use, "dropout", table(), axes, vocabulary=False)
    return torch.initial_seed()


def test_ranks_with_the_same_rows_and_layers_draw_the_same(ranks: Ranks) -> None:
    first, neighbour, second, third = ranks.run(4, _seeds, {"shard": 2, "tensor": 2})
    assert first == neighbour == 5, "ranks along the tensor axis"
    assert second == third != first
    assert len(set(ranks.run(4, _seeds, {"replicate": 2, "pipeline": 2}))) == 4
