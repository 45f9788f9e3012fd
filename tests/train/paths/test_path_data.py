"""Assignments that are not of the job's data, or of its paths, are refused in words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from atoll.config import JobSpec
from atoll.data import Assignment, Dataset
from atoll.errors import DataError
from atoll.train.build import Built, build
from atoll.train.paths.data import path_data
from tests.train.paths.kit import job_of


@pytest.fixture
def job(tmp_path: Path) -> tuple[JobSpec, Built, Path]:
    spec = job_of(tmp_path, [2], nodes=2)
    file = tmp_path / "paths.safetensors"
    spec = replace(spec, dipaco=replace(spec.dipaco, assignment=str(file)))
    return spec, build(spec, member="w0", slot=0, num_slots=2), file


def write(file: Path, built: Built, paths: list[int], *, data: str = "") -> None:
    assert isinstance(built.dataset, Dataset)
    bounds = np.linspace(0, len(built.dataset.train), len(paths) + 1).astype(np.int64)
    table = np.array(paths, dtype=np.int32)[:, None]
    made = Assignment(bounds, table, max(paths) + 1, data or built.dataset.digest)
    made.write(file, about={})


def test_sizes_of_shards_are_known(job: tuple[JobSpec, Built, Path]) -> None:
    spec, built, file = job
    write(file, built, [0, 1, 1, 1])
    found = path_data(spec, built)
    assert [documents for documents, _ in found.sizes] == [1, 3]
    assert sum(tokens for _, tokens in found.sizes) == len(built.dataset.train)


@pytest.mark.parametrize(
    ("paths", "data", "words"),
    [
        ([0, 1, 2], "", "another number of paths"),
        ([0, 1], "0" * 32, "not those of this job"),
        ([1, 1], "", "path 0: 0"),
    ],
    ids=["paths", "data", "an empty shard"],
)
def test_other_assignments_are_refused(
    job: tuple[JobSpec, Built, Path], paths: list[int], data: str, words: str
) -> None:
    spec, built, file = job
    write(file, built, paths, data=data)
    with pytest.raises(DataError, match=words):
        path_data(spec, built)
