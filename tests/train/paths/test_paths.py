"""What DiPaCo must be in its special cases, and what its modules are to each other."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from atoll.checkpoint.format.weights import load_weights
from atoll.config import JobSpec
from atoll.errors import ConfigError
from atoll.group.in_process.groups import MemoryGroups
from atoll.train import trainer
from atoll.train.build import Built, build
from tests.train.members import train_member
from tests.train.paths.kit import job_of, run_paths, same, without_paths

BUILDING = threading.Lock()


def one_at_a_time(*arguments: Any, **options: Any) -> Built:
    """Build what a member trains: torch's random numbers are those of the process."""
    with BUILDING:
        return build(*arguments, **options)


def diloco(spec: JobSpec, folder: Path, *, members: int) -> dict[str, Tensor]:
    """Return the weights that DiLoCo with so many members trains."""
    groups = MemoryGroups(members)

    def one(group: Any) -> Any:
        place = folder / f"diloco-{members}-{group.me}"
        place.mkdir()
        return train_member(spec, group, place)

    with patch.object(trainer, "build", one_at_a_time):
        groups.together(one)
    return dict(load_weights(folder / f"diloco-{members}-w0" / "model.safetensors").state)


def test_one_path_is_diloco_with_one_member(tmp_path: Path) -> None:
    spec = job_of(tmp_path, [1, 1], nodes=1)
    found = run_paths(spec, tmp_path, members=1)
    expected = diloco(without_paths(spec, nodes=1), tmp_path, members=1)
    assert same(found.weights[0], expected)


def test_paths_with_the_same_modules_are_diloco(tmp_path: Path) -> None:
    spec = job_of(tmp_path, [1, 1], nodes=3, more="copies = 3")
    found = run_paths(spec, tmp_path, members=3)
    expected = diloco(without_paths(spec, nodes=3), tmp_path, members=3)
    assert all(same(found.weights[path], expected) for path in range(3))


def test_modules_on_all_paths_are_equal_everywhere(tmp_path: Path) -> None:
    spec = job_of(tmp_path, [2, 1], nodes=2)
    found = run_paths(spec, tmp_path, members=2)
    first, second = found.weights[0], found.weights[1]
    equal = {name for name in first if torch.equal(first[name], second[name])}
    assert "head.weight" in equal
    assert equal < first.keys()
    assert {len(digests) for digests in found.digests().values()} == {1}


def test_paths_that_share_no_module_train_independently(tmp_path: Path) -> None:
    spec = job_of(tmp_path, [2], nodes=2)
    both = run_paths(spec, tmp_path / "both", members=2)
    turns = run_paths(spec, tmp_path / "turns", members=1)
    assert all(same(both.weights[path], turns.weights[path]) for path in range(2))
    assert not same(both.weights[0], both.weights[1])
    rounds = both.hub.rounds()
    assert rounds == {0: 2, 1: 2}


def test_paths_of_one_member_share_no_optimizer_state(tmp_path: Path) -> None:
    spec = job_of(tmp_path, [2], nodes=2)  # Adagrad has its state before the first step
    spec = replace(spec, train=replace(spec.train, optimizer="torch:Adagrad"))
    both = run_paths(spec, tmp_path / "both", members=2)
    turns = run_paths(spec, tmp_path / "turns", members=1)
    assert all(same(both.weights[path], turns.weights[path]) for path in range(2))


def test_holders_of_a_module_have_the_same_bits(tmp_path: Path) -> None:
    spec = job_of(tmp_path, [2, 2], nodes=4)
    found = run_paths(spec, tmp_path, members=4)
    assert sorted(found.digests()) == [0, 1, 2, 3]
    assert all(len(digests) == 1 for digests in found.digests().values())
    assert len({next(iter(digests)) for digests in found.digests().values()}) == 4


def test_fewer_members_than_paths_reach_the_same_by_turns(tmp_path: Path) -> None:
    spec = job_of(tmp_path, [2, 2], nodes=4)
    four = run_paths(spec, tmp_path / "four", members=4)
    two = run_paths(spec, tmp_path / "two", members=2)
    for path in range(4):
        for name, tensor in four.weights[path].items():
            torch.testing.assert_close(two.weights[path][name], tensor, rtol=1e-4, atol=1e-5)
    steps = {result["tokens"] for result in two.results.values()}
    assert steps == {2 * 6 * 4 * 16}


def test_a_model_that_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    spec = job_of(tmp_path, [1] * 9, nodes=1)
    with pytest.raises(ConfigError, match="more levels than the model has units"):
        run_paths(spec, tmp_path, members=1)
