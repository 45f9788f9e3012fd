"""Activations that are predicted are those that autograd keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from atoll.config import JobSpec
from atoll.models import MODELS
from atoll.plan.memory import plan_memory, sample, sizes_of
from atoll.plan.stages import Cut
from atoll.strategies.inner.precision import computing, widened
from atoll.train.build import whole_model
from atoll.train.computing import options_on
from tests.plan.jobs import job

WITHIN = 0.02


def saved_bytes(spec: JobSpec) -> int:
    """Return what autograd keeps of a real forward pass, without the model's own tensors."""
    rows = spec.train.batch // spec.train.accumulate
    model: Any = whole_model(spec)
    inputs, targets = sample(sizes_of(spec), model, rows=rows)
    own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers(), inputs)}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with computing(spec.train.precision, torch.device("cpu")):
            outputs = model(inputs)
        loss = model.criterion(widened(outputs, spec.train.precision), targets)
    assert loss.requires_grad
    own.add(targets.untyped_storage()._cdata)
    return sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in own)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_they_are_what_autograd_keeps(tmp_path: Path, model: str, precision: str) -> None:
    spec = job(tmp_path, model=model, train=f'precision = "{precision}"\naccumulate = 2')
    (rank,) = plan_memory(spec).ranks
    expected = saved_bytes(spec)
    assert rank.activations + rank.copies == pytest.approx(expected, rel=WITHIN)
    assert (rank.copies > 0) == (precision == "bf16")


def test_recomputation_keeps_the_inputs_of_units_only(tmp_path: Path) -> None:
    usual, less, matmul = (
        plan_memory(job(tmp_path, train=f'recompute = "{word}"')).ranks[0]
        for word in ("none", "full", "matmul")
    )
    assert less.activations < matmul.activations < usual.activations
    assert less.static == usual.static


def test_half_precision_copies_are_half_of_the_matrices(tmp_path: Path) -> None:
    (rank,) = plan_memory(job(tmp_path, train='precision = "bf16"')).ranks
    width, vocabulary, layers = 16, 256, 2
    assert rank.copies == 2 * (layers * 12 * width * width + vocabulary * width)


def test_ranks_that_share_rows_keep_less(tmp_path: Path) -> None:
    alone = plan_memory(job(tmp_path)).ranks[0]
    shared = plan_memory(job(tmp_path, strategy='inner = "ddp"', island="ranks = 4"))
    assert shared.rows == 2
    assert shared.ranks[0].activations == pytest.approx(alone.activations / 4, rel=WITHIN)


@pytest.mark.parametrize(("schedule", "held"), [("gpipe", [4, 4]), ("1f1b", [2, 1])])
def test_stages_keep_as_many_passes_as_their_order_says(
    tmp_path: Path, schedule: str, held: list[int]
) -> None:
    island = f'ranks = 2\nschedule = "{schedule}"\nmicrobatches = 4\ncuts = [3]'
    spec = job(tmp_path, strategy='inner = "pipeline"', island=island)
    plan = plan_memory(spec)
    assert (plan.rows, plan.cuts, plan.guessed) == (2, (3,), False)
    assert plan.held == max(held)
    options = options_on(spec, torch.device("cpu"))
    with FakeTensorMode():
        cut = Cut(whole_model(spec), options, batch=spec.train.batch)
        places = cut.places(*sample(sizes_of(spec), whole_model(spec), rows=cut.rows))
    for rank, place, count in zip(plan.ranks, places, held, strict=True):
        assert place.held == count
        assert rank.activations == place.passed.kept * count


def test_sequence_parallel_keeps_pieces(tmp_path: Path) -> None:
    strategy, ranks = 'inner = "tensor"', "ranks = 2\n"
    usual = plan_memory(job(tmp_path, strategy=strategy, island=ranks)).ranks[0]
    pieces = plan_memory(job(tmp_path, strategy=strategy, island=ranks + "sequence = true"))
    assert pieces.ranks[0].activations < usual.activations
    assert pieces.ranks[0].static == usual.static
