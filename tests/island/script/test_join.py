"""How `atoll.join()` learns how the ranks of its island lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.config import MeshShape, RankPlace, read_spec
from atoll.errors import ConfigError
from atoll.group.single import SingleGroup
from atoll.run import Run
from atoll.run.connect import _ranks
from atoll.run.follower import FollowerRun
from atoll.run.place import Membership
from atoll.train.island.script_ranks import RankMessage, ScriptRanks


def place(ranks: int, *, rank: int = 0) -> RankPlace:
    return RankPlace(rank=rank, ranks=ranks, local_rank=rank, address="127.0.0.1", port=1)


def test_a_process_by_itself_is_the_only_rank() -> None:
    alone = _ranks(None, spec=None, mesh={"tensor": 2})
    assert (alone.place.rank, alone.place.ranks, str(alone.shape)) == (0, 1, "1 rank")
    assert not alone.met


def test_the_job_file_says_how_ranks_lie_before_the_script_does() -> None:
    file = {"job": {"script": "train.py"}, "island": {"ranks": 4}}
    spec = read_spec(file)
    assert str(_ranks(place(4), spec=spec, mesh=None).shape) == "shard=4"
    by_script = _ranks(place(4), spec=spec, mesh={"replicate": 2, "tensor": 2})
    assert str(by_script.shape) == "replicate=2 tensor=2"
    spec = read_spec({**file, "island": {"mesh": {"shard": 2, "tensor": 2}}})
    by_file = _ranks(place(4, rank=3), spec=spec, mesh={"tensor": 4})
    assert str(by_file.shape) == "shard=2 tensor=2"
    assert (by_file.data_rank, by_file.leads) == (1, False)


def test_without_a_job_file_all_ranks_have_rows_of_their_own() -> None:
    assert [_ranks(place(3, rank=r), spec=None, mesh=None).data_rank for r in range(3)] == [0, 1, 2]


def test_an_island_that_lost_ranks_keeps_its_tensor_axis() -> None:
    spec = read_spec({"job": {"script": "t.py"}, "island": {"mesh": {"replicate": 2, "tensor": 2}}})
    assert str(_ranks(place(2), spec=spec, mesh=None).shape) == "tensor=2"
    with pytest.raises(ConfigError, match="the mesh does not divide"):
        _ranks(place(3), spec=spec, mesh=None)


def test_a_follower_takes_over_as_its_first_rank_does(tmp_path: Path) -> None:
    ranks = ScriptRanks(place(2, rank=1), shape=MeshShape(shard=2))
    run = FollowerRun(ranks, Membership(tmp_path), member="w0")
    with pytest.raises(ConfigError, match="not joined"):
        _ = run.takes_over
    ranks.message = Run(SingleGroup(), Membership(tmp_path))._word()
    assert not run.takes_over
    ranks.message = RankMessage(takes_over=True)
    assert run.takes_over
