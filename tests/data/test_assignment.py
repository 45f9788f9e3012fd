"""Documents assigned to paths."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from atoll.data.assignment import NO_PATH, Assignment, read_assignment
from atoll.errors import DataError

BOUNDS = np.array([0, 5, 5, 9])
PATHS = np.array([[1, 0], [0, NO_PATH], [1, NO_PATH]], dtype=np.int32)


def test_shared_documents_belong_to_both_paths() -> None:
    made = Assignment(BOUNDS, PATHS, num_paths=3)
    assert [made.documents(path).tolist() for path in range(3)] == [[0, 1], [0, 2], []]
    assert made.tokens().tolist() == [5, 9, 0]


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    file = tmp_path / "paths.safetensors"
    Assignment(BOUNDS, PATHS, num_paths=3, data="ab12").write(file, about={"of": "us"})
    read = read_assignment(file)
    assert (read.num_paths, read.data) == (3, "ab12")
    assert np.array_equal(read.bounds, BOUNDS)
    assert np.array_equal(read.paths, PATHS)


@pytest.mark.parametrize(
    ("bounds", "paths"),
    [(BOUNDS[::-1], PATHS), (BOUNDS[1:], PATHS), (BOUNDS, PATHS + 2), (BOUNDS, PATHS - 1)],
)
def test_what_cannot_be_is_refused(bounds: np.ndarray, paths: np.ndarray) -> None:
    with pytest.raises(DataError, match="inconsistent"):
        Assignment(bounds, paths, num_paths=3)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "paths.safetensors"
    with pytest.raises(DataError, match=r"paths\.safetensors"):
        read_assignment(file)
    file.write_bytes(b"12")
    with pytest.raises(DataError, match=r"paths\.safetensors"):
        read_assignment(file)
