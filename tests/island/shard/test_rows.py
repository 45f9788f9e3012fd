"""Rows of a batch are dealt out once each, or refused with the numbers that work."""

from __future__ import annotations

import itertools

import pytest
import torch

from atoll.config import MeshShape
from atoll.config.reading import parse_spec
from atoll.errors import ConfigError
from atoll.island.world import build_mesh
from atoll.strategies.inner.base import Rows, sum_over_data
from tests.island.pool import Ranks
from tests.island.reference import CPU

INPUTS = torch.arange(24)
TARGETS = INPUTS * 10


@pytest.mark.parametrize(("ranks", "accumulate"), [(1, 1), (1, 4), (2, 3), (4, 1), (4, 6)])
def test_every_row_is_dealt_out_once_and_in_order(ranks: int, accumulate: int) -> None:
    dealt = [
        part
        for rank in range(ranks)
        for part in Rows(rank=rank, ranks=ranks, accumulate=accumulate).deal(INPUTS, TARGETS)
    ]
    assert len(dealt) == ranks * accumulate
    assert len({len(inputs) for inputs, _ in dealt}) == 1
    assert torch.equal(torch.cat([inputs for inputs, _ in dealt]), INPUTS)
    assert torch.equal(torch.cat([targets for _, targets in dealt]), TARGETS)


@pytest.mark.parametrize("rows", range(1, 20))
@pytest.mark.parametrize(("ranks", "accumulate"), [(1, 1), (2, 3), (4, 2)])
def test_any_number_of_rows_counts_once(rows: int, ranks: int, accumulate: int) -> None:
    everybody = [
        list(Rows(rank=rank, ranks=ranks, accumulate=accumulate).fill(INPUTS[:rows]))
        for rank in range(ranks)
    ]
    assert len({len(mine) for mine in everybody}) == 1  # ranks meet in each part
    parts = list(itertools.chain.from_iterable(everybody))
    assert sum(share for share, _ in parts) == pytest.approx(1.0)
    assert all(len(inputs) for _, (inputs,) in parts)
    counted = torch.cat([inputs for share, (inputs,) in parts if share])
    assert torch.equal(counted, INPUTS[:rows])
    mean = sum(share * float(inputs.double().mean()) for share, (inputs,) in parts)
    assert mean == pytest.approx(float(INPUTS[:rows].double().mean()))


@pytest.mark.parametrize(
    ("rows", "words", "told"),
    [
        (10, {"ranks": 4}, ["10 rows", "4 data ranks", "multiple of 4", "batch = 8 or 12"]),
        (8, {"ranks": 2, "accumulate": 3}, ["accumulate = 3", "multiple of 6", "6 or 12"]),
        (2, {"microbatches": 4}, ["4 microbatches", "batch = 4 in"]),
    ],
)
def test_uneven_rows_are_refused_with_the_nearest_that_work(
    rows: int, words: dict[str, int], told: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        Rows(**words).deal(INPUTS[:rows])
    for word in told:
        assert word in str(caught.value)


def test_targets_of_other_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="not the same number"):
        Rows().deal(INPUTS, TARGETS[:5])


def _placed() -> tuple[int, int, float]:
    shape = MeshShape(replicate=2, tensor=2)
    mesh = build_mesh(shape, device=CPU)
    rows = Rows.of(mesh, accumulate=2)
    return rows.rank, rows.ranks, float(sum_over_data(torch.tensor(1.0 + rows.rank), mesh))


def test_ranks_of_one_tensor_group_have_the_same_rows(ranks: Ranks) -> None:
    assert ranks.run(4, _placed) == [(0, 2, 3.0), (0, 2, 3.0), (1, 2, 3.0), (1, 2, 3.0)]


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("[train]\nbatch = 6\naccumulate = 4", "batch = 4 or 8"),
        ('[strategy]\ninner = "ddp"\n[island]\nranks = 4\n[train]\nbatch = 6', "batch = 4 or 8"),
        ('[train]\nrecompute = "some"', "every:N"),
    ],
)
def test_a_job_file_that_cannot_work_is_refused_before_it_starts(lines: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_spec(f'[job]\nname = "one"\n{lines}\n')


def test_rows_of_a_script_are_its_own_affair() -> None:
    lines = '[job]\nname = "one"\nscript = "train.py"\n[train]\nbatch = 7\naccumulate = 2\n'
    assert parse_spec(lines).train.batch == 7
