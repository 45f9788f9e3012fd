"""The scale of the loss in fp16 goes on where it stood: from checkpoints and from other members."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from atoll.checkpoint import DirectoryStore, load_weights
from atoll.checkpoint.format.nested import TREE, nest
from atoll.checkpoint.format.part import Part, member_part
from atoll.config import read_spec
from atoll.errors import CheckpointError
from atoll.island.command_broadcaster import CommandBroadcaster
from atoll.island.world import build_mesh
from atoll.strategies.inner import precision
from atoll.strategies.inner.worker import Worker
from atoll.train.island.island_trainer import TrainerIsland
from atoll.train.state.committed import CommittedState, adopt
from tests.island.leading import Member, by_itself, count_calls, led, table
from tests.island.pool import Ranks
from tests.island.reference import CPU
from tests.island.trainer.test_recovery import diloco
from tests.island.trainer.test_trainer import Tables, job, tables

SQUARE = {"replicate": 2, "shard": 2}
MESHES: list[dict[str, int]] = [{}, SQUARE]
State = dict[str, float]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(6):
        lines = [f"def f{number}_{n}(x):\n    return x * {n} + {number}\n" for n in range(120)]
        (folder / f"{number}.py").write_text("".join(lines), encoding="utf-8")
    return f"files:{folder}/*.py"


def half(corpus: str, mesh: dict[str, int]) -> Tables:
    train = {"steps": 8, "precision": "fp16", "eval_tokens": 64}
    return tables(corpus, mesh, job={"nodes": 1}, train=train, checkpoint={"every": 1})


def _train(given: Tables, folder: Path, stop_at: int, resume_round: int) -> State:
    """Train as a rank; return this rank's scale at the end.

    It starts where gradients overflow, and grows soon: so that it is never the first one.
    """
    precision.FIRST_SCALE, precision.GOOD_STEPS = 2.0**30, 4  # here only: a fork for this alone
    spec = read_spec(given)
    settings: dict[str, Any] = {"store": DirectoryStore(folder / "store")}
    if stop_at:
        asked = iter(range(1_000))
        settings["should_stop"] = lambda: next(asked) >= stop_at
    if spec.mesh.ranks == 1:
        job(spec, folder, members=1, resume_round=resume_round, **settings)
        return {}
    broadcaster = CommandBroadcaster(rank=dist.get_rank(), ranks=dist.get_world_size())
    island = TrainerIsland(spec, broadcaster, mesh=build_mesh(spec.mesh, device=CPU), device=CPU)
    if broadcaster.leads:
        job(spec, folder, members=1, island=island, resume_round=resume_round, **settings)
        broadcaster.end()
    else:
        broadcaster.serve()
    return island.scaler.state_dict()


def saved_scale(folder: Path, round_: int) -> State:
    name = member_part("w0")
    part = DirectoryStore(folder / "store").get(round_, names={name})[name]
    return dict(nest(part.metadata[TREE], part.tensors)["scaler"])


@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: " ".join(m) or "one process")
@pytest.mark.every(3)
def test_a_run_in_half_precision_goes_on_bit_for_bit(
    ranks: Ranks, corpus: str, tmp_path: Path, mesh: dict[str, int]
) -> None:
    given = half(corpus, mesh)
    count = read_spec(given).mesh.ranks
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    expected = ranks.run(count, _train, given, whole, 0, -1)
    ranks.run(count, _train, given, parted, 5, -1)
    round_ = DirectoryStore(parted / "store").latest()
    between = saved_scale(parted, round_)
    assert between["scale"] < 2.0**30, "an overflow has lowered it"
    assert ranks.run(count, _train, given, parted, 0, round_) == expected
    found = load_weights(parted / "w0" / "model.safetensors").state
    for name, tensor in load_weights(whole / "w0" / "model.safetensors").state.items():
        assert torch.equal(found[name], tensor), name


# ------------------------------------------------------------------------------ from other members

NAME = "single"
STOOD: State = {"scale": 512.0, "good_steps": 3}


def give(member: Member) -> tuple[Part, Part]:
    """Return the state of a member whose scale was elsewhere before its last steps."""
    outer, _ = diloco(member)
    assert member.task.scaler is not None
    member.task.scaler.load_state_dict(STOOD)
    member.train(2)
    told = count_calls(member) if member.broadcaster is not None else []
    parts = CommittedState(member.task, outer).parts()
    assert told == [], "others read from threads, in which no rank can be asked"
    return parts


def _give(axes: dict[str, int]) -> Any:
    return led(give, NAME, table(), axes, precision="fp16")


def _take(axes: dict[str, int], shared: Part, inner: Part, spoilt: Part) -> State:
    """Let a fresh island take a state over, after one that is refused; return a rank's scale."""
    keep: list[Worker] = []

    def use(member: Member) -> None:
        outer, group = diloco(member)
        with pytest.raises(CheckpointError, match="no power of two"):
            adopt(member.task, outer, shared=shared, inner=spoilt)
        adopt(member.task, outer, shared=shared, inner=inner)
        group.committed_round = member.task.round  # as the hub would say
        member.train(1)

    led(use, NAME, table(), axes, keep, precision="fp16")
    return keep[0].scaler.state_dict()


def test_islands_and_plain_members_share_the_loss_scale(ranks: Ranks) -> None:
    after = {"scale": 512.0, "good_steps": 5}
    shared, inner = ranks.run(4, _give, SQUARE)[0]
    plain = by_itself(NAME, table(), precision="fp16")
    adopt(plain.task, diloco(plain)[0], shared=shared, inner=inner)
    assert scale_of(plain) == after

    shared, inner = give(by_itself(NAME, table(), precision="fp16"))
    spoilt = Part(inner.name, inner.tensors, {k: _bent(v) for k, v in inner.metadata.items()})
    told = ranks.run(2, _take, {"pipeline": 2}, shared, inner, spoilt)
    assert told == [{**after, "good_steps": 6}] * 2, "on every rank"


def _bent(text: str) -> str:
    assert "512.0" in text
    return text.replace("512.0", "500.0")


def test_other_precisions_neither_give_nor_take_a_scale() -> None:
    shared, inner = give(by_itself(NAME, table(), precision="fp16"))
    plain = by_itself(NAME, table(), precision="bf16")
    outer, _ = diloco(plain)
    adopt(plain.task, outer, shared=shared, inner=inner)
    assert scale_of(plain) == {}
    shared, inner = CommittedState(plain.task, outer).parts()
    other = by_itself(NAME, table(), precision="fp16")
    adopt(other.task, diloco(other)[0], shared=shared, inner=inner)
    assert scale_of(other) == {"scale": precision.FIRST_SCALE, "good_steps": 0}


def scale_of(member: Member) -> State:
    assert member.task.scaler is not None
    return member.task.scaler.state_dict()
