"""Where a model is cut into stages: as well as can be, alike on all ranks, or refused."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
import torch.distributed
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from atoll.config import MeshShape
from atoll.errors import ConfigError
from atoll.island.world import build_mesh
from atoll.strategies.inner.divide import split_model
from atoll.strategies.inner.options import InnerOptions, PipelineShape
from atoll.strategies.inner.pipeline.balance import balanced
from atoll.strategies.inner.pipeline.cuts import (
    check_cuts,
    check_stages,
    cuts_by_size,
    profile,
)
from atoll.strategies.inner.pipeline.pipeline import PipelineParts
from atoll.strategies.inner.pipeline.stages import chain_of, check_chain
from tests.island.pool import Ranks
from tests.island.reference import CPU, FEATURES, Perceptron, batch_for, gpt, odd

dist: Any = torch.distributed
COSTS = st.lists(st.integers(0, 9) | st.floats(0, 10, allow_nan=False), min_size=1, max_size=9)


def _dearest(costs: list[float], cuts: tuple[int, ...], speeds: list[float]) -> float:
    edges = [0, *cuts, len(costs)]
    stages = zip(itertools.pairwise(edges), speeds, strict=True)
    return max(sum(costs[a:b]) / speed for (a, b), speed in stages)


@given(COSTS, st.data())
def test_no_cuts_are_better(costs: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    speeds = data.draw(
        st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=stages, max_size=stages)
        | st.just([1.0] * stages)
    )
    cuts = balanced(costs, stages=stages, speeds=speeds)
    assert check_cuts(cuts, units=len(costs), stages=stages) == cuts
    every = itertools.combinations(range(1, len(costs)), stages - 1)
    best = min(_dearest(costs, cuts, speeds) for cuts in every)
    assert _dearest(costs, cuts, speeds) == pytest.approx(best, rel=1e-9, abs=1e-9)
    assert balanced(costs, stages=stages, speeds=speeds) == cuts


def test_what_the_dearest_stage_leaves_open_is_cut_evenly() -> None:
    assert balanced([1, 1, 1, 1, 9], stages=3) == (2, 4)
    assert balanced([1] * 8, stages=4) == (2, 4, 6)


class _Slow(nn.Module):
    """Computes nothing of use, for a while."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        begun = time.thread_time()  # by the wall clock a busy machine would do it for nothing
        while time.thread_time() - begun < self.seconds:
            pass
        return x * 2


class _Counted(Perceptron):
    def __init__(self) -> None:
        super().__init__(
            nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), _Slow(0.02), nn.Linear(6, 2)
        )


def test_a_profile_finds_the_slow_unit_and_changes_nothing() -> None:
    model = _Counted().double()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    inputs, targets = batch_for(model)
    found = profile(list(model), model.criterion, inputs, targets, device=CPU)
    assert [one.sent_bytes for one in found] == [8 * len(inputs) * n for n in (6, 6, 6, 6, 2)]
    assert found[3].forward_s > 0.02 > found[3].backward_s
    times = [one.total_s for one in found]
    assert len(times) == 5
    assert times[3] > 0.02 > sum(times) - times[3]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_units_that_are_alike_cost_the_same() -> None:
    model = gpt(layers=4)
    found = profile(model.units(), model.criterion, *batch_for(model), device=CPU)
    times = [one.total_s for one in found]
    assert len(set(times[2:6])) == 1 < len(set(times))


def test_without_data_models_are_cut_by_their_weights() -> None:
    model = gpt(layers=6, vocab_size=2000)
    units = chain_of(model)[0]
    assert len(units) == 10
    # The output layer has most weights; the embedding, as large, costs a look-up.
    assert cuts_by_size(units, stages=2)[0] >= 8


def test_stages_are_made_of_what_a_model_calls_its_units() -> None:
    model = gpt()
    assert chain_of(model) == (model.units(), True)
    nested = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2))
    assert chain_of(nested) == ([nested[0][0], nested[0][1], nested[1]], True)  # type: ignore[index]


class _Chain(nn.Module):
    """A model as people write them: layers, and a forward pass that goes through them."""

    def __init__(self, *, skips: bool = False) -> None:
        super().__init__()
        self.front = nn.Linear(FEATURES, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.skips = skips

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        for layer in self.layers:
            x = layer(x) + (x if self.skips else 0)
        return x

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets[:, :1]).square().mean()


def test_guessed_units_have_to_compute_what_the_model_does() -> None:
    inputs, _ = batch_for(_Chain())
    good, bad = _Chain().double(), _Chain(skips=True).double()
    units, sure = chain_of(good)
    assert (units, sure) == ([good.front, *good.layers], False)
    check_chain(good, units, inputs)
    with pytest.raises(ConfigError, match=r"outputs differ.*units\(\)"):
        check_chain(bad, chain_of(bad)[0], inputs)
    with pytest.raises(ConfigError, match="no data to compare with"):
        check_chain(good, units, None)


class _Embeddings(nn.Module):
    """Its first child has fewer rows than there are tokens: chained, it is asked for others."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.tokens = nn.Embedding(4, 8), nn.Embedding(100, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        places = self.positions(torch.arange(tokens.shape[1]))
        return torch.as_tensor(self.tokens(tokens) + places)


def test_a_guessed_unit_that_raises_an_index_error_is_refused() -> None:
    model = _Embeddings()
    with pytest.raises(ConfigError, match=r"positions \(Embedding\) does not take the inputs"):
        check_chain(model, chain_of(model)[0], torch.full((2, 3), 50))


def test_models_whose_units_leave_parameters_out_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"none of its units.*without frozen.*let units\(\) return "
    ):
        chain_of(odd())


@pytest.mark.parametrize(
    ("units", "shape", "remedy"),
    [
        (3, PipelineShape("1f1b", 4), "pipeline = 3"),
        (1, PipelineShape("gpipe", 2), "ddp"),
        (5, PipelineShape("interleaved", 2, 3), "chunks = 2"),
        (3, PipelineShape("interleaved", 2, 2), "1f1b"),
    ],
)
def test_more_stages_than_units_are_refused(units: int, shape: PipelineShape, remedy: str) -> None:
    with pytest.raises(ConfigError, match=rf"{units} units.*at most {units} stages.*{remedy}"):
        check_stages(units, shape)
    check_stages(shape.stages, shape)


@pytest.mark.parametrize("cuts", [(0, 3), (3, 3), (4, 2), (2, 7), (3,), (1, 2, 3)])
def test_cuts_that_do_not_make_the_stages_are_refused(cuts: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"cuts = \[2, 5\]"):
        check_cuts(cuts, units=7, stages=3)
    assert check_cuts((1, 6), units=7, stages=3) == (1, 6)


def _cut(model: nn.Module, axes: dict[str, int], *, known: bool, **words: Any) -> Any:
    """Divide a model of which the first rank alone has data; return its cuts or what was said."""
    mesh = build_mesh(MeshShape(**axes), device=CPU)
    sample = batch_for(model) if known and mesh.get_rank() == 0 else None
    options = InnerOptions(shape=MeshShape(**axes), **words)
    found: Any
    try:
        parts = split_model(model, options, mesh=mesh, device=CPU, sample=sample)
        assert isinstance(parts, PipelineParts)
        parts.backward(*batch_for(model))
        found = parts.cuts
    except ConfigError as error:
        found = str(error)
    dist.barrier()  # others may still be on their way into the groups of the mesh
    return found


def _measured() -> Any:
    return _cut(_Counted().double(), {"pipeline": 3}, known=True)


def test_all_ranks_cut_where_the_first_one_measured(ranks: Ranks) -> None:
    found = ranks.run(3, _measured)
    assert found == [(3, 4)] * 3


def _chained(skips: bool) -> Any:
    torch.manual_seed(1)
    return _cut(_Chain(skips=skips).double(), {"pipeline": 2}, known=True, cuts=(2,))


def test_all_ranks_refuse_what_the_first_one_finds(ranks: Ranks) -> None:
    assert ranks.run(2, _chained, False) == [(2,)] * 2
    first, second = ranks.run(2, _chained, True)
    assert first == second
    assert "outputs differ" in first


def _refused(words: dict[str, Any]) -> str:
    found = _cut(gpt(), {"pipeline": 2}, known=False, **words)
    assert isinstance(found, str), found
    return found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"schedule": "interleaved", "chunks": 4}, "7 units"),
        ({"microbatches": 1}, "microbatches = 2"),
        ({"microbatches": 3}, "3 microbatches"),
        ({"schedule": "gpipe", "accumulate": 16}, "a multiple of"),
        ({"cuts": (9,)}, "cuts = [4]"),
    ],
)
def test_what_cannot_work_is_refused_on_every_rank(
    ranks: Ranks, words: dict[str, Any], said: str
) -> None:
    for found in ranks.run(2, _refused, words):
        assert said in found


class _Twice(Perceptron):
    """A layer that comes back two stages later."""

    def __init__(self) -> None:
        again = nn.Linear(FEATURES, FEATURES)
        super().__init__(again, nn.Tanh(), again, nn.Linear(FEATURES, 2))


def _twice(words: dict[str, Any]) -> Any:
    return _cut(_Twice().double(), {"pipeline": 2}, known=False, **words)


def test_two_stages_of_one_rank_cannot_share_a_weight(ranks: Ranks) -> None:
    words = {"schedule": "interleaved", "chunks": 2, "cuts": (1, 2, 3)}
    for found in ranks.run(2, _twice, words):
        assert "0.weight on stages [0, 2]" in found
    assert ranks.run(2, _twice, {"cuts": (1,)}) == [(1,)] * 2
