"""A script goes on from a checkpoint bit for bit: random numbers, data and what it keeps itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import atoll
from atoll.checkpoint import DirectoryStore, Saved, SavePoint
from atoll.config import CheckpointTable, MeshShape
from atoll.errors import CheckpointError, ConfigError
from atoll.group.single import SingleGroup
from atoll.run import Run
from atoll.run.rank_state import RankState
from atoll.train.sharding import deal
from atoll.train.shares.share import DataSetShare
from atoll.train.shares.sources import Division
from tests.island.pool import Ranks
from tests.island.script.kit import by_ddp, by_fsdp, enter, net, whole

SAMPLES, BATCH, EVERY = 40, 2, 2
WAYS = {"fsdp": (MeshShape(shard=2), by_fsdp), "ddp": (MeshShape(replicate=2), by_ddp),
        "alone": (MeshShape(), None)}  # fmt: skip


class _AtOnce:
    """Writes checkpoints when it is told, where a job's own writer does so beside training."""

    def __init__(self, store: DirectoryStore) -> None:
        self._store = store

    def save(self, point: SavePoint, parts: Any, *, final: bool) -> Any:
        self._store.put(point, parts)
        return Saved(0, 0.0)

    def close(self, *, timeout_s: float) -> None:
        pass


def _entered(shape: MeshShape, folder: Path, round_: int) -> Run:
    """Return this rank's run; the first one keeps checkpoints, and may go on from one."""
    store = DirectoryStore(folder)
    run = enter(shape, folder=folder, group=SingleGroup(committed_round=max(0, round_)))
    if not run.rank:
        store.close = lambda: None  # type: ignore[attr-defined]
        run._saving = CheckpointTable(every=1)
        run._enrolled = SimpleNamespace(  # type: ignore[assignment]
            late=False, replaced=False, store=lambda: store, saver=lambda: _AtOnce(store),
            recovery=SimpleNamespace(offer=lambda *_: None),
            connection=SimpleNamespace(registered=SimpleNamespace(resume_round=round_)),
        )  # fmt: skip
    return run


class _Counter:
    """Something of the script's own."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "twice": torch.tensor([2 * self.value])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert int(state["twice"]) == 2 * state["value"]
        self.value = state["value"]


def _script(way: str, folder: Path, round_: int, stop_at: int, until: int) -> Any:
    """Train; return the rows that this rank saw from `round_` on, weights, and its counter."""
    shape, spread = WAYS[way]
    seen: list[list[float]] = []
    with _entered(shape, folder, round_) as run:
        layers: Any = net()
        model: nn.Module = nn.Sequential(*layers, nn.Dropout(0.5))
        if spread is not None:
            model = spread(model, run)
        torch.manual_seed(run.rank)
        counter, late = _Counter(), _Counter()
        inner = torch.optim.AdamW(model.parameters(), 0.01)
        run.keep("counter", counter)
        optimizer = run.wrap(model, inner, outer=atoll.DiLoCo(every=EVERY), codec="fp32")
        run.keep("late", late)
        x = torch.arange(SAMPLES * 6, dtype=torch.float32).view(SAMPLES, 6) / 100
        loader = run.shard(DataLoader(TensorDataset(x), batch_size=BATCH, shuffle=True))
        more = iter(run.shard(_forever()))
        while run.step < until:
            for (rows,) in loader:
                seen.append([*rows[:, 0].tolist(), next(more)])
                counter.value += 1 + run.rank
                late.value += 3
                loss = model(rows + 0.01 * torch.randn_like(rows)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if run.step in (stop_at, until):
                    break
            if run.step == stop_at:
                break
        found = whole(model)
        kept = (counter.value, late.value)
        if stop_at:  # as if it had been killed: nobody agrees on anything
            run.finish = lambda: None  # type: ignore[method-assign]
    return seen, found, kept


def _forever() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.every(2)
def test_a_script_goes_on_bit_for_bit(ranks: Ranks, tmp_path: Path, way: str) -> None:
    count = WAYS[way][0].ranks
    steps = SAMPLES // BATCH // count + 5  # into a second pass over the data
    expected = ranks.run(count, _script, way, tmp_path / "whole", -1, 0, steps)
    ranks.run(count, _script, way, tmp_path / "parted", -1, 7, steps)
    round_ = DirectoryStore(tmp_path / "parted").latest()
    assert round_ > 0
    found = ranks.run(count, _script, way, tmp_path / "parted", round_, 0, steps)
    for rank, (seen, weights, kept) in enumerate(found):
        assert 0 < len(seen) < len(expected[rank][0])
        assert seen == expected[rank][0][-len(seen) :], "the same rows, and those that follow"
        assert kept == expected[rank][2]
        for name, tensor in weights.items():
            assert torch.equal(tensor, expected[rank][1][name]), name


def _rows_of(folder: Path, round_: int, ways: list[str]) -> list[float]:
    """Return which rows a rank sees first after a resume."""
    with _entered(WAYS[ways[dist.get_world_size() - 1]][0], folder, round_) as run:
        model = by_fsdp(net(), run) if run.ranks > 1 else net()
        inner = torch.optim.AdamW(model.parameters(), 0.01)
        run.wrap(model, inner, outer=atoll.DiLoCo(every=EVERY), codec="fp32")
        x = torch.arange(SAMPLES, dtype=torch.float32)
        loader = run.shard(DataLoader(TensorDataset(x), batch_size=BATCH))
        run.finish = lambda: None  # type: ignore[method-assign]
        return [float(v) for v in next(iter(loader))[0]]


def test_other_ranks_go_on_at_the_same_sample(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, _script, "fsdp", tmp_path, -1, 7, 20)
    round_, ways = DirectoryStore(tmp_path).latest(), ["alone", "fsdp"]
    going_on = ranks.run(2, _rows_of, tmp_path, round_, ways)
    (alone,) = ranks.run(1, _rows_of, tmp_path, round_, ways)
    assert sorted(alone) == sorted(rows[0] for rows in going_on), "half as many ranks as rows"


class TestKept:
    def test_a_name_is_kept_once_and_needs_a_state(self) -> None:
        kept = RankState()
        kept.thing("counter", _Counter())
        with pytest.raises(ConfigError, match="a second object with that name"):
            kept.thing("counter", _Counter())
        with pytest.raises(ConfigError, match="int without state_dict and load_state_dict"):
            kept.thing("number", 3)

    def test_a_state_of_something_else_is_refused_by_its_name(self) -> None:
        kept, other = RankState(), RankState()
        kept.thing("rates", _Counter())
        kept.restore([])
        other.thing("rates", nn.Linear(2, 2))
        with pytest.raises(CheckpointError, match="'rates' does not fit"):
            kept.restore(other.gather())

    @pytest.mark.parametrize("shuffle", [True, False])
    def test_a_pass_goes_on_where_another_stood(self, shuffle: bool) -> None:
        def share() -> Any:
            data = TensorDataset(torch.arange(23.0))
            loader = DataLoader(data, batch_size=3, shuffle=shuffle)
            return deal(loader, Division(1, 2, 5))

        def numbers(batches: Any) -> list[Tensor]:
            return [rows.tolist() for (rows,) in batches]

        first = share()
        passes = [numbers(first) for _ in range(3)]
        assert shuffle == (passes[0] != passes[1])
        again = share()
        list(again)
        under_way = iter(again)
        next(under_way)
        next(under_way)
        other = share()
        other.resume(again.place())
        assert numbers(other) == [], "the first pass was done before"
        assert numbers(other) == passes[1][2:]
        assert numbers(other) == passes[2]
        at_the_end = share()
        list(again)
        at_the_end.resume(again.place())
        at_the_end.set_epoch(again.place()["passes"])
        assert len(numbers(at_the_end)) == len(at_the_end)

    def test_a_share_that_comes_later_takes_its_whole_place(self) -> None:
        kept = RankState()
        kept.move(1, {"data_pass": 0, "offset": 6, "0.passes": 0, "0.offset": 6, "0.order": 7})
        assert kept.place() is not None
        share = deal(range(10), Division(0, 2, 5))
        assert isinstance(share, DataSetShare)
        kept.share(share.share)
        assert kept._cursor == {}

    def test_places_of_others_do_not_count(self) -> None:
        mine, theirs = deal(range(10), Division(0, 2, 5)), deal(range(10), Division(0, 3, 5))
        other = deal(range(10), Division(0, 3, 6))
        assert isinstance(mine, DataSetShare)
        assert isinstance(theirs, DataSetShare)
        assert isinstance(other, DataSetShare)
        next(iter(theirs))
        whole = list(deal(range(10), Division(0, 2, 5)))
        mine.share.resume(theirs.share.place())
        mine.share.resume(other.share.place())
        assert list(mine) == whole
