"""Scripts in islands: a user's own spread model, with outer strategies around its steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import atoll
from atoll.config import MeshShape
from atoll.errors import ConfigError
from atoll.group.single import SingleGroup
from atoll.run import Run
from atoll.run.place import Membership
from atoll.train.state.committed import CommittedState, adopt
from tests.island.pool import Ranks
from tests.island.script.kit import WAYS, by_fsdp, enter, net, rows, train, whole

OUTERS: dict[str, Any] = {
    "diloco": atoll.DiLoCo(every=3, outer_lr=0.8, outer_momentum=0.5),
    "streaming": atoll.Streaming(every=4, fragments=2),
    "cocktail": atoll.Cocktail(),
    "slowmo": atoll.SlowMo(every=3, slow_momentum=0.4),
}


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


def _spread(way: str, outer: str, folder: str) -> tuple[dict[str, Tensor], list[float], int]:
    shape, spread = WAYS[way]
    with enter(shape, folder=Path(folder)) as run:
        model = spread(net(), run)
        optimizer = run.wrap(model, adamw(model), outer=OUTERS[outer])
        losses = train(run, model, optimizer)
        run.finish()
        found = whole(model)
    return found, losses, run.step


def _plain(outer: str, folder: Path) -> dict[str, Tensor]:
    with Run(SingleGroup(), Membership(folder)) as run:
        model = net()
        optimizer = run.wrap(model, adamw(model), outer=OUTERS[outer])
        train(run, model, optimizer)
    return whole(model)


@pytest.mark.parametrize(
    ("way", "outer"),
    [
        ("fsdp", "diloco"), ("ddp", "diloco"), ("tensor", "diloco"), ("both", "diloco"),
        ("fsdp", "streaming"), ("fsdp", "cocktail"), ("tensor", "slowmo"),
    ],
)  # fmt: skip
@pytest.mark.every(3)
def test_a_spread_model_ends_as_the_whole_one(
    ranks: Ranks, tmp_path: Path, way: str, outer: str
) -> None:
    found = ranks.run(4 if way == "both" else 2, _spread, way, outer, str(tmp_path))
    expected = _plain(outer, tmp_path)
    for parameters, _, step in found:
        assert step == 8
        assert parameters.keys() == expected.keys()
        for name, value in parameters.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def _stopped(folder: str, *, by_follower: bool) -> tuple[int, int]:
    shape, spread = WAYS["fsdp"]
    group, steps = SingleGroup(), 0
    with enter(shape, folder=Path(folder), group=group) as run:
        model = spread(net(), run)
        optimizer = run.wrap(model, adamw(model), outer=OUTERS["diloco"])
        while not run.stopping:
            train(run, model, optimizer, steps=1, first=steps)
            steps += 1
            if steps == 3 and by_follower and run.rank == 1:
                run._leave_soon()
            if steps == 3 and not by_follower:
                group.stopping = True
        where = run.step
    return steps, where


@pytest.mark.parametrize("by_follower", [False, True])
@pytest.mark.every(2)
def test_all_ranks_stop_after_the_same_step(
    ranks: Ranks, tmp_path: Path, by_follower: bool
) -> None:
    found = ranks.run(2, partial(_stopped, str(tmp_path), by_follower=by_follower))
    assert found == [(4, 4), (4, 4)]


def _logged(way: str, folder: str) -> tuple[float | None, int]:
    shape, spread = WAYS[way]
    with enter(shape, folder=Path(folder)) as run:
        model = spread(net(), run)
        run.wrap(model, adamw(model), outer="local-sgd")
        run.log(loss=float(run.rank), tokens=10)
        run.finish()
        if run.rank:
            return None, 0
        task = run._task
        assert task is not None
        return task.losses.take(), task.tokens


@pytest.mark.parametrize(("way", "tokens"), [("fsdp", 20), ("tensor", 10), ("both", 20)])
@pytest.mark.every(2)
def test_rows_are_counted_once_and_losses_averaged(
    ranks: Ranks, tmp_path: Path, way: str, tokens: int
) -> None:
    count = 4 if way == "both" else 2
    assert ranks.run(count, _logged, way, str(tmp_path))[0] == ((count - 1) / 2, tokens)


def _saved(folder: str) -> tuple[str | None, dict[str, Tensor], str]:
    shape, spread = WAYS["both"]
    with enter(shape, folder=Path(folder)) as run:
        model = spread(net(), run)
        optimizer = run.wrap(model, adamw(model), outer=OUTERS["diloco"])
        train(run, model, optimizer, steps=4)
        with pytest.raises(ConfigError, match="the model that was wrapped") as caught:
            run.save(net())
        path = run.save(model)
        return str(path) if path else None, whole(model), str(caught.value)


def test_the_whole_model_is_saved_once(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(4, _saved, str(tmp_path))
    assert [path for path, _, _ in found] == [str(tmp_path / "model.safetensors"), *[None] * 3]
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == net().state_dict().keys()
    for name, value in found[3][1].items():
        assert torch.equal(saved[name], value)


def _evaluated(folder: str, *, looks: bool) -> tuple[dict[str, Tensor], list[Tensor]]:
    shape, spread = WAYS["fsdp"]
    seen = []
    with enter(shape, folder=Path(folder)) as run:
        model = spread(net(), run)
        optimizer = run.wrap(model, adamw(model), outer=OUTERS["diloco"])
        for step in range(6):
            train(run, model, optimizer, steps=1, first=step)
            if looks:
                with run.evaluating(), torch.no_grad():
                    seen.append(model(rows(0)[0]).sum())
        run.finish()
        return whole(model), seen


def test_a_look_at_the_agreed_parameters_changes_nothing(ranks: Ranks, tmp_path: Path) -> None:
    """After a forward pass FSDP keeps gathered parameters, which must not survive a change."""
    quiet = ranks.run(2, partial(_evaluated, str(tmp_path), looks=False))[1][0]
    loud, seen = ranks.run(2, partial(_evaluated, str(tmp_path), looks=True))[1]
    for name, value in loud.items():
        assert torch.equal(value, quiet[name])
    assert seen[0] == seen[1]  # no round before step 3
    assert seen[1] != seen[2]


def _shares(way: str, folder: str) -> list[list[int]]:
    data = list(range(23))
    with enter(WAYS[way][0], folder=Path(folder)) as run:
        loader = DataLoader(TensorDataset(torch.arange(23)), batch_size=4, shuffle=True)
        return [
            [int(x) for x in run.shard(data)],
            [int(x) for x in run.shard(iter(data))],
            [int(x) for (batch,) in run.shard(loader) for x in batch],
        ]


def test_data_ranks_have_different_rows_and_equally_many(ranks: Ranks, tmp_path: Path) -> None:
    for first, second in zip(*ranks.run(2, _shares, "fsdp", str(tmp_path)), strict=True):
        assert len(first) == len(second) == 11
        assert not set(first) & set(second)


def test_tensor_ranks_have_the_same_rows(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(2, _shares, "tensor", str(tmp_path))
    assert first == second
    assert all(len(share) == 23 for share in first)
    apart, beside, *_ = ranks.run(4, _shares, "both", str(tmp_path))
    assert apart == beside


def _taken_over(way: str, folder: str) -> dict[str, Tensor]:
    """Train otherwise for a while, then take over a plain member's state and go on as it does."""
    (shape, spread), group = WAYS[way], SingleGroup()
    with enter(shape, folder=Path(folder), group=group) as run:
        model = spread(net(seed=9), run)
        optimizer = run.wrap(model, adamw(model), outer=OUTERS["diloco"])
        train(run, model, optimizer, steps=2, first=50)
        with run._at("finish") if run.rank == 0 else _followed(run):
            if run.rank == 0:
                _, donor = _donor(Path(folder))
                shared, inner = donor.parts()
                adopt(run._task, optimizer.outer, shared=shared, inner=inner)  # type: ignore[arg-type, attr-defined]
                group.committed_round = run._task.round  # type: ignore[union-attr]
        train(run, model, optimizer, steps=4, first=3)
        run.finish()
        return whole(model)


@contextmanager
def _followed(run: Run) -> Iterator[None]:
    run.finish()
    yield


def _donor(folder: Path) -> tuple[Run, CommittedState]:
    run = Run(SingleGroup(), Membership(folder))
    model = net()
    optimizer = run.wrap(model, adamw(model), outer=OUTERS["diloco"])
    train(run, model, optimizer, steps=3)
    return run, CommittedState(run._task, optimizer.outer)  # type: ignore[arg-type, attr-defined]


@pytest.mark.parametrize("way", ["fsdp", "both"])
@pytest.mark.every(2)
def test_an_island_takes_over_the_state_of_a_process(
    ranks: Ranks, tmp_path: Path, way: str
) -> None:
    found = ranks.run(4 if way == "both" else 2, _taken_over, way, str(tmp_path))
    with Run(SingleGroup(), Membership(tmp_path)) as run:
        model = net()
        optimizer = run.wrap(model, adamw(model), outer=OUTERS["diloco"])
        train(run, model, optimizer, steps=7)
    for name, value in whole(model).items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-5, atol=1e-6)


def _state(way: str, folder: str) -> tuple[dict[str, Any], bool]:
    """Return the gathered state of the optimizer, and whether giving it back changes a thing."""
    shape, spread = WAYS[way]
    with enter(shape, folder=Path(folder)) as run:
        model = spread(net(), run)
        optimizer = run.wrap(model, adamw(model), outer="local-sgd")
        train(run, model, optimizer, steps=2)
        before = [_moments(optimizer.inner)]
        state: dict[str, Any] = {}
        with run._at("finish") if run.rank == 0 else _followed(run):
            if run.rank == 0:
                state = run._task.optimizer.state_dict()  # type: ignore[union-attr]
                run._task.optimizer.load_state_dict(state)  # type: ignore[union-attr]
        same = all(
            torch.equal(a, b) for a, b in zip(before[0], _moments(optimizer.inner), strict=True)
        )
        return state, same


def _moments(optimizer: Any) -> list[Tensor]:
    found = [own["exp_avg"] for own in optimizer.state.values()]
    return [getattr(value, "to_local", lambda value=value: value)().clone() for value in found]


def test_the_state_of_the_optimizer_is_that_of_a_whole_model(ranks: Ranks, tmp_path: Path) -> None:
    with Run(SingleGroup(), Membership(tmp_path)) as run:
        model = net()
        optimizer = run.wrap(model, adamw(model), outer="local-sgd")
        train(run, model, optimizer, steps=2)
        expected = optimizer.inner.state_dict()
    for way in ("fsdp", "tensor"):
        (state, same), (_, others) = ranks.run(2, _state, way, str(tmp_path))
        assert same
        assert others
        assert state["param_groups"] == expected["param_groups"]
        for number, own in expected["state"].items():
            for key, value in own.items():
                torch.testing.assert_close(state["state"][number][key], value, rtol=1e-5, atol=1e-6)


def _overflowed(folder: str) -> tuple[list[bool], list[float], bool]:
    shape, spread = WAYS["fsdp"]
    skipped, scales = [], []
    with enter(shape, folder=Path(folder)) as run:
        model = spread(net(), run)
        optimizer = run.wrap(model, adamw(model), outer=OUTERS["diloco"])
        scaler = GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            before = whole(model)
            x, y = rows(step)
            loss = torch.nn.functional.mse_loss(model(x), y)
            if step == 1 and run.rank == 1:
                loss = loss * float("inf")
            optimizer.zero_grad()
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
            skipped.append(optimizer.skipped)
            scales.append(scaler.get_scale())
            if step == 1:
                still = all(torch.equal(v, before[n]) for n, v in whole(model).items())
    return skipped, scales, still


def test_an_overflow_on_one_rank_is_skipped_by_all(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(2, _overflowed, str(tmp_path))
    assert first == second == ([False, True, False, False], [1024.0, 512.0, 512.0, 512.0], True)


def _elsewhere(folder: str) -> str:
    run = enter(WAYS["fsdp"][0], folder=Path(folder))
    _ = run.mesh
    with pytest.raises(ConfigError) as caught:
        (run.finish if run.rank else run.stepped)()
    return str(caught.value)


def test_ranks_at_different_places_are_told_apart(ranks: Ranks, tmp_path: Path) -> None:
    for told in ranks.run(2, _elsewhere, str(tmp_path)):
        assert "rank 0: track, rank 1: finish" in told


def _refused(folder: str) -> list[str]:
    told = []
    run = enter(WAYS["fsdp"][0], folder=Path(folder))
    if run.rank:
        for ask in (
            lambda: run.slot, lambda: run.queue("work"), lambda: run.topic("news"), run.barrier,
            lambda: run.broadcast(torch.ones(1)), lambda: run.all_reduce(torch.ones(1), "max"),
        ):  # fmt: skip
            with pytest.raises(ConfigError) as caught:
                ask()
            told.append(str(caught.value))
    model = FullyShardedDataParallel(net(), device_id=torch.device("cpu"))
    stage = net()[run.rank : run.rank + 3]  # type: ignore[index]
    for outer, spread in (("ddp", by_fsdp(net(), run)), ("diloco", model), ("diloco", stage)):
        with pytest.raises(ConfigError) as caught:
            run.wrap(spread, adamw(spread), outer=outer)
        told.append(str(caught.value))
    return told


def test_what_an_island_cannot_do_is_refused_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(2, _refused, str(tmp_path))
    assert first == second[6:]
    assert "run.mesh" in second[0]
    assert "queues and topics" in second[1]
    assert all("several processes" in told for told in second[3:6])
    assert "combine" in first[0]
    assert "fully_shard" in first[1]
    assert "different parameters" in first[2]
    for told in ranks.run(3, _too_many, str(tmp_path)):
        assert "shard=2" in told
        assert "3 ranks" in told


def _too_many(folder: str) -> str:
    with pytest.raises(ConfigError) as caught:
        enter(WAYS["fsdp"][0], folder=Path(folder))
    return str(caught.value)


def test_a_process_alone_may_spread_its_model_over_itself(ranks: Ranks, tmp_path: Path) -> None:
    WAYS_ALONE = (MeshShape(), by_fsdp)
    (found,) = ranks.run(1, partial(_over_itself, *WAYS_ALONE), str(tmp_path))
    for name, value in _plain("diloco", tmp_path).items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def _over_itself(shape: MeshShape, spread: Any, folder: str) -> dict[str, Tensor]:
    with enter(shape, folder=Path(folder)) as run:
        model = spread(net(), run)
        train(run, model, run.wrap(model, adamw(model), outer=OUTERS["diloco"]))
        run.finish()
        return whole(model)
