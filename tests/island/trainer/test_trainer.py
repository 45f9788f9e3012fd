"""The built-in trainer over an island: one member like any other."""

from __future__ import annotations

import dataclasses
import json
import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from atoll.checkpoint import DirectoryStore, load_weights
from atoll.config import JobSpec, dump_spec, read_spec
from atoll.config.island_tables import IslandTable
from atoll.errors import ConfigError
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.group.single import SingleGroup
from atoll.island.command_broadcaster import CommandBroadcaster
from atoll.island.world import build_mesh
from atoll.plan.pipelines import PipelinePlan, with_plan
from atoll.train.computing import options_on
from atoll.train.island.island_trainer import TrainerIsland
from atoll.train.results.sample import load_model
from atoll.train.trainer import Trainer
from atoll.wire.messages import Registered
from tests.island.pool import Ranks
from tests.island.reference import CPU
from tests.train.members import train_member

SQUARE = {"replicate": 2, "shard": 2}
Tables = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(6):
        lines = [f"def f{number}_{n}(x):\n    return x * {n} + {number}\n" for n in range(120)]
        (folder / f"{number}.py").write_text("".join(lines), encoding="utf-8")
    return f"files:{folder}/*.py"


def tables(corpus: str, mesh: dict[str, int] | None = None, **more: dict[str, Any]) -> Tables:
    """Return a small job; members are islands of a mesh, or processes by themselves."""
    base: Tables = {
        "job": {"nodes": 2, "threads": 1, "device": "cpu"},
        "model": {"layers": 2, "width": 16, "heads": 2, "context": 16},
        "data": {"corpus": corpus},
        "train": {"steps": 6, "batch": 4, "lr": 0.01, "warmup": 2, "eval_tokens": 512},
        "strategy": {"preset": "diloco", "every": 3, "shared_steps": 0, "codec": "fp32"},
    }
    if mesh:
        base["strategy"]["inner"] = "hybrid"
        base["island"] = {"mesh": mesh}
    for name, table in more.items():
        base[name] = base.get(name, {}) | table
    return base


def job(
    spec: JobSpec,
    folder: Path,
    *,
    members: int,
    island: TrainerIsland | None = None,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Train; the first member is the island, if there is one. The others are plain threads."""
    local = dataclasses.replace(
        spec, strategy=dataclasses.replace(spec.strategy, inner="local"), island=IslandTable()
    )
    groups = MemoryGroups(members) if members > 1 else None
    alone = SingleGroup(committed_round=max(0, settings.get("resume_round", 0)))
    each = list(groups) if groups is not None else [alone]
    for group in each:
        (folder / group.me).mkdir(parents=True, exist_ok=True)

    def body(group: Group) -> dict[str, Any]:
        slot = int(group.me[1:])
        here = island if slot == 0 else None
        return train_member(
            spec if here is not None else local, group, folder / group.me, island=here, **settings
        )

    if groups is None:
        return [body(alone)]
    with _OneByOne():
        return groups.together(body)


class _OneByOne:
    """Lets members that are threads draw their weights in turn: torch's generator is global."""

    def __enter__(self) -> None:
        self._prepare, lock = Trainer.prepare, threading.Lock()
        prepare = self._prepare

        def in_turn(trainer: Trainer, start: Registered) -> None:
            with lock:
                prepare(trainer, start)

        Trainer.prepare = in_turn  # type: ignore[assignment,method-assign]

    def __exit__(self, *error: object) -> None:
        Trainer.prepare = self._prepare  # type: ignore[method-assign]


def run_job(given: Tables, folder: Path, members: int, stop_at: int, resume_round: int) -> Any:
    """Be a rank of the first member; the first rank returns the results of all members."""
    spec = read_spec(given)
    broadcaster = CommandBroadcaster(rank=dist.get_rank(), ranks=dist.get_world_size())
    mesh = build_mesh(spec.mesh, device=CPU)
    island = TrainerIsland(spec, broadcaster, mesh=mesh, device=CPU)
    if not broadcaster.leads:
        broadcaster.serve()
        return None
    settings: dict[str, Any] = {"store": DirectoryStore(folder / "store")}
    if stop_at:
        settings["should_stop"] = _after(stop_at)
    try:
        return job(
            spec, folder, members=members, island=island, resume_round=resume_round, **settings
        )
    finally:
        broadcaster.end()


def _after(steps: int) -> Any:
    asked = iter(range(1_000))
    return lambda: next(asked) >= steps


def weights(folder: Path) -> dict[str, Tensor]:
    return load_weights(folder / "w0" / "model.safetensors").state


def close(found: dict[str, Tensor], expected: dict[str, Tensor], within: float = 2e-5) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        worst = float((found[name] - tensor).abs().max())
        assert worst <= within, f"{name}: {worst}"


@pytest.mark.parametrize(
    "mesh",
    [{"shard": 2}, SQUARE, {"pipeline": 2}, {"tensor": 2}, {"pipeline": 2, "tensor": 2}],
    ids=" ".join,
)
@pytest.mark.every(2)
def test_an_island_and_a_plain_member_train_one_model(
    ranks: Ranks, corpus: str, tmp_path: Path, mesh: dict[str, int]
) -> None:
    count = len(mesh) * 2
    there = ranks.run(count, run_job, tables(corpus, mesh), tmp_path / "there", 2, 0, -1)
    first, second = there[0]
    here, _ = job(read_spec(tables(corpus)), tmp_path / "here", members=2)
    assert first["digest"] == second["digest"]
    assert first["steps"] == 6
    assert first["tokens"] == here["tokens"]
    assert first["sent_bytes"] == here["sent_bytes"], "each parameter crosses the slow link once"
    assert first["loss_final"] == pytest.approx(here["loss_final"], rel=1e-5)
    assert first["first_loss_sum"] == pytest.approx(here["first_loss_sum"], rel=1e-5)
    close(weights(tmp_path / "there"), weights(tmp_path / "here"))
    assert first["sample"].startswith("def ")
    model, _ = load_model(tmp_path / "there" / "w0" / "model.safetensors")
    assert sum(p.numel() for p in model.parameters()) == first["parameters"]


@pytest.mark.parametrize("vocabulary", [True, False])
@pytest.mark.every(2)
def test_untied_models_begin_under_pipeline_and_tensor(
    ranks: Ranks, corpus: str, tmp_path: Path, vocabulary: bool
) -> None:
    untied: Tables = {"model": {"name": "llama", "tie": False}, "job": {"nodes": 1}}
    given = tables(corpus, {"pipeline": 2, "tensor": 2}, **untied)
    given["island"]["vocabulary"] = vocabulary
    ranks.run(4, run_job, given, tmp_path / "there", 1, 0, -1)
    job(read_spec(tables(corpus, **untied)), tmp_path / "here", members=1)
    close(weights(tmp_path / "there"), weights(tmp_path / "here"))


def test_a_run_goes_on_under_other_meshes_and_in_one_process(
    ranks: Ranks, corpus: str, tmp_path: Path
) -> None:
    """Two rounds over a square, two over shards, the rest by a process; as if nothing had been."""
    # Adam divides by what may be next to nothing: with it other roundings are no small matter.
    train = {"steps": 9, "optimizer": "sgd", "lr": 0.1}
    job_: Tables = {"job": {"nodes": 1}, "train": train, "checkpoint": {"every": 1}}
    run, over = tmp_path / "run", {"shard": 2}
    ranks.run(4, run_job, tables(corpus, SQUARE, **job_), run, 1, 4, -1)
    ranks.run(2, run_job, tables(corpus, over, **job_), run, 1, 3, _last(run))
    store = DirectoryStore(run / "store")
    spec = read_spec(tables(corpus, **job_))
    (end,) = job(spec, run, members=1, store=store, resume_round=_last(run))
    (expected,) = job(spec, tmp_path / "whole", members=1)
    assert end["steps"] == expected["steps"] == 9
    assert end["tokens"] == expected["tokens"]
    assert end["loss_final"] == pytest.approx(expected["loss_final"], rel=1e-5)
    close(weights(run), weights(tmp_path / "whole"))


# Stages, replicas, microbatches and cuts of plans, and the number of steps until the next one.
TWICE_SMALLER = [(2, 2, 2, (3,), 4), (3, 1, 3, (2, 4), 3), (1, 1, 4, (), 0)]
FEWER_STAGES = [(4, 2, 6, (1, 2, 4), 4), (2, 3, 2, (3,), 0)]  # its second stage has no weights


@pytest.mark.parametrize("shapes", [TWICE_SMALLER, FEWER_STAGES], ids=["2x2-3x1-1x1", "4x2-2x3"])
@pytest.mark.every(2)
def test_a_pipeline_that_morphs_keeps_its_loss_curve(
    ranks: Ranks, corpus: str, tmp_path: Path, shapes: list[tuple[int, int, int, Any, int]]
) -> None:
    """Other plans of one job: the batch stays, and the checkpoint of one is loaded by the next."""
    train = {"steps": 9, "optimizer": "sgd", "lr": 0.1, "batch": 12}
    job_: Tables = {"job": {"nodes": 1}, "train": train, "checkpoint": {"every": 1}}
    island: Tables = {"strategy": {"inner": "pipeline"}, "island": {"elastic": True, "ranks": 8}}
    spec = read_spec(tables(corpus, **job_, **island))
    run = tmp_path / "run"
    for stages, replicas, microbatches, cuts, stop_at in shapes:
        plan = PipelinePlan(
            stages=stages, replicas=replicas, rows=12 // (replicas * microbatches), cuts=cuts,
            microbatches=microbatches, predicted_s=1.0, reduce_s=0.0, worst_bytes=0,
        )  # fmt: skip
        given = tomllib.loads(dump_spec(with_plan(spec, plan)))
        before = _last(run) if (run / "store").exists() else -1
        found = ranks.run(plan.ranks, run_job, given, run, 1, stop_at, before)
    ((end,), *_) = found
    whole = read_spec(tables(corpus, **job_))
    (expected,) = job(whole, tmp_path / "whole", members=1)
    assert (end["steps"], end["tokens"]) == (9, expected["tokens"])
    assert end["loss_final"] == pytest.approx(expected["loss_final"], rel=1e-5)
    close(weights(run), weights(tmp_path / "whole"))
    steps, curve = points(run), points(tmp_path / "whole")
    assert steps.keys() == curve.keys()
    assert list(steps.values()) == pytest.approx(list(curve.values()), rel=1e-5)


def points(folder: Path) -> dict[int, float]:
    """Return the training loss by step."""
    lines = (folder / "w0" / "metrics.jsonl").read_text("utf-8").splitlines()
    found = map(json.loads, lines)
    return {point["step"]: point["loss"] for point in found if "loss" in point}


def _last(run: Path) -> int:
    return DirectoryStore(run / "store").latest()


def _alone(given: Tables, folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        train_member(read_spec(given), SingleGroup(), folder)
    return str(caught.value)


def test_a_process_alone_does_not_pretend_to_be_an_island(corpus: str, tmp_path: Path) -> None:
    told = _alone(tables(corpus, SQUARE), tmp_path)
    assert "mesh replicate=2 shard=2" in told
    assert "4 ranks" in told


def _unfit(given: Tables) -> str:
    """Return what a job is refused with at its start; nobody waits for anybody afterwards."""
    spec = read_spec(given)
    broadcaster = CommandBroadcaster(rank=dist.get_rank(), ranks=dist.get_world_size())
    island = TrainerIsland(spec, broadcaster, mesh=build_mesh(spec.mesh, device=CPU), device=CPU)
    try:
        if broadcaster.leads:
            train_member(spec, SingleGroup(), Path(), island=island)
        else:
            broadcaster.serve()
    except ConfigError as error:
        return str(error)
    finally:
        if broadcaster.leads:
            broadcaster.end()
    return ""


def test_methods_on_gradients_are_refused_at_the_start(ranks: Ranks, corpus: str) -> None:
    given = tables(corpus, {"shard": 2}, strategy={"outer": "every_step", "preset": "ddp"})
    for name in ("every", "shared_steps"):
        given["strategy"].pop(name)
    told, other = ranks.run(2, _unfit, given)
    assert "does not expose" in told
    assert other == "", "the other rank was sent home"


def _precision(rank_with: int) -> str:
    """Return what an island computes in whose accelerators differ."""
    has = dist.get_rank() == rank_with
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("atoll.strategies.inner.precision.has_bf16", lambda _: has or rank_with < 0)
        return options_on(read_spec({}), CPU, island=True).precision


@pytest.mark.parametrize(("rank_with", "expected"), [(0, "fp32"), (-1, "bf16")])
def test_ranks_with_unlike_accelerators_agree_on_a_precision(
    ranks: Ranks, rank_with: int, expected: str
) -> None:
    assert ranks.run(2, _precision, rank_with) == [expected] * 2
