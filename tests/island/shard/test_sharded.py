"""Checkpoints of spread models: any mesh loads what any other saved, bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from atoll.checkpoint import DirectoryStore, describe
from atoll.checkpoint.sharded import (
    ShardedInfo,
    Trained,
    export_sharded,
    load_sharded,
    save_sharded,
    start_sharded,
)
from atoll.checkpoint.state.ranks import RankGroup
from atoll.checkpoint.state.sharded_state import ties_of
from atoll.config import MeshShape, parse_spec
from atoll.data import ByteTokenizer
from atoll.errors import CheckpointCorrupt, CheckpointError
from atoll.island.world import build_mesh
from atoll.models import build_model
from atoll.strategies.inner.divide import split_model
from atoll.strategies.inner.gather_scatter import as_part
from atoll.strategies.inner.options import InnerOptions
from atoll.strategies.inner.sharded_optimizer import LocalShard
from atoll.train.optim.optimizers import build_optimizer
from atoll.train.results.sample import load_model, write_text
from atoll.wire.manifest import ABOUT_NAME, PIECES_FORMAT, checkpoint_folder
from tests.island.pool import Ranks

SQUARE = MeshShape(shard=2, tensor=2)
SHAPES = [SQUARE, MeshShape(shard=4), MeshShape(replicate=2, shard=2), MeshShape(tensor=2),
          MeshShape(pipeline=2, tensor=2), MeshShape()]  # fmt: skip


class Net(nn.Module):
    """Words to words with one weight for both ends; ten hidden features split unevenly."""

    scale: Tensor

    def __init__(self, *, hidden: int = 10) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 6)
        self.up = nn.Linear(6, hidden)
        self.down = nn.Linear(hidden, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor([0.5]))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.down(torch.tanh(self.up(self.embedding(x))))
        out: Tensor = self.head(self.norm(hidden) * self.scale)
        return out


class Held:
    """What a rank has of a net under some mesh."""

    def __init__(self, shape: MeshShape, *, seed: int, hidden: int = 10) -> None:
        torch.manual_seed(seed)
        net = Net(hidden=hidden)
        self.ties = ties_of(net)
        mesh = build_mesh(shape, device=torch.device("cpu"))
        if shape.tensor > 1:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(net, mesh["tensor"], plan)
        if shape.shard > 1:
            data = mesh["replicate", "shard"] if shape.replicate > 1 else mesh["shard"]
            fully_shard(net.up, mesh=data)
            fully_shard(net, mesh=data)
        self._named = {name: p for name, p in net.named_parameters() if self._here(name, mesh)}
        self._scale: dict[str, Tensor] = {"scale": net.scale}
        self.optimizer = torch.optim.AdamW(
            [{"params": [p]} for p in self._named.values()], lr=0.01 * seed
        )

    @staticmethod
    def _here(name: str, mesh: Any) -> bool:
        """The first of two stages ends before `down`; both have the shared weight."""
        if mesh["pipeline"].size() == 1 or name.startswith("embedding"):
            return True
        return bool(mesh["pipeline"].get_local_rank() == int(not name.startswith("up")))

    def parameters(self) -> Mapping[str, nn.Parameter]:
        return self._named

    def buffers(self) -> Mapping[str, Tensor]:
        return self._scale

    def train(self) -> None:
        """Make values and moments that tell every element of every tensor from every other."""
        for number, parameter in enumerate(self._named.values()):
            parameter.grad = torch.full_like(parameter, 0.1 * (number + 1))
            with torch.no_grad():
                parameter.grad.mul_(parameter)
        self.optimizer.step()

    def whole(self) -> dict[str, Any]:
        """Return everything as lists of numbers by name, gathered."""
        found: dict[str, Any] = {"lr": self.optimizer.param_groups[0]["lr"]}
        for name, parameter in self._named.items():
            state = self.optimizer.state.get(parameter, {})
            for key, value in {"": parameter, **state}.items():
                full = value.full_tensor() if isinstance(value, DTensor) else value
                found[f"{name}/{key}"] = full.detach().tolist()
        return found


def _save(folder: Path, shape: MeshShape, beside: bool) -> dict[str, Any]:
    held = Held(shape, seed=1)
    held.train()
    before = held.whole()
    if beside:
        saving = start_sharded(
            folder, 1, Trained(held, held.optimizer), ShardedInfo(3, ties=held.ties)
        )
        with torch.no_grad():
            for parameter in held.parameters().values():
                parameter.zero_()
        saving.finish()
    else:
        save_sharded(
            folder,
            1,
            Trained(held, held.optimizer),
            ShardedInfo(3, texts={"model": "net"}, numbers={"wall_s": 1.5}, ties=held.ties),
        )
    return before


def _load(folder: Path, shape: MeshShape) -> dict[str, Any]:
    held = Held(shape, seed=7)
    about = load_sharded(folder, 1, Trained(held, held.optimizer))
    assert (about.step, about.ties) == (3, {"head.weight": "embedding.weight"})
    return held.whole()


def _together(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what all ranks have, which have to agree where they have the same."""
    whole: dict[str, Any] = {}
    for each in found:
        for name, value in each.items():
            assert whole.setdefault(name, value) == value, name
    return whole


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A checkpoint of four ranks in a square, and what was saved."""
    folder = tmp_path_factory.mktemp("sharded") / "job"
    return folder, _together(ranks.run(4, _save, folder, SQUARE, False))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.every(4)
def test_any_mesh_goes_on_from_a_square(
    ranks: Ranks, saved: tuple[Path, dict[str, Any]], shape: MeshShape
) -> None:
    folder, before = saved
    assert len(before) == 1 + 4 * 7
    assert _together(ranks.run(shape.ranks, _load, folder, shape)) == before


def test_stages_and_one_process_load_each_others(ranks: Ranks, tmp_path: Path) -> None:
    stages = MeshShape(pipeline=2, tensor=2)
    before = _together(ranks.run(4, _save, tmp_path / "stages", stages, False))
    assert _together(ranks.run(1, _load, tmp_path / "stages", MeshShape())) == before
    alone = _together(ranks.run(1, _save, tmp_path / "alone", MeshShape(), False))
    assert _together(ranks.run(4, _load, tmp_path / "alone", stages)) == alone
    assert before.keys() == alone.keys()


def test_what_changes_while_files_are_written_is_not_in_them(ranks: Ranks, tmp_path: Path) -> None:
    before = _together(ranks.run(4, _save, tmp_path, SQUARE, True))
    assert _together(ranks.run(2, _load, tmp_path, MeshShape(shard=2))) == before


def test_every_rank_writes_its_pieces_and_nothing_twice(
    saved: tuple[Path, dict[str, Any]],
) -> None:
    folder, _ = saved
    manifest = DirectoryStore(folder).verify(1)
    assert manifest.versions["format"] == PIECES_FORMAT
    assert (manifest.members, manifest.step) == (["rank0", "rank1", "rank2", "rank3"], 3)
    held = [load_file(path) for path in sorted(folder.glob("checkpoints/*/rank-*"))]
    assert len(held) == 4
    assert all(0 < tensors["model/up.weight"].numel() < 60 for tensors in held)
    elements = sum(t.numel() for tensors in held for t in tensors.values())
    parameters = 8 * 6 + 6 * 10 + 10 + 10 * 6 + 6 + 6 + 6
    assert elements == 3 * parameters + 7 + 1  # two moments, seven step counters, one buffer


def test_export_is_one_file_that_plain_torch_loads(
    saved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, before = saved
    export_sharded(folder, 1, tmp_path / "x.safetensors")
    net = Net()
    net.load_state_dict(load_file(tmp_path / "x.safetensors"))
    for name, parameter in net.named_parameters():
        assert parameter.tolist() == before[name + "/"]


def _wrong_model(folder: Path) -> str:
    held = Held(MeshShape(shard=2), seed=1, hidden=12)
    with pytest.raises(CheckpointError) as caught:
        load_sharded(folder, 1, Trained(held, held.optimizer))
    return str(caught.value)


def test_checkpoint_of_another_model_is_refused_on_every_rank(
    ranks: Ranks, saved: tuple[Path, dict[str, Any]]
) -> None:
    for told in ranks.run(2, _wrong_model, saved[0]):
        assert "of another model" in told
        assert "up.weight (10, 6) instead of (12, 6)" in told


def _damaged(folder: Path) -> str:
    held = Held(MeshShape(shard=2), seed=1)
    with pytest.raises(CheckpointCorrupt) as caught:
        load_sharded(folder, 1, Trained(held, held.optimizer))
    return str(caught.value)


@pytest.mark.parametrize("file", ["rank-00001.safetensors", ABOUT_NAME])
def test_damage_is_named_on_every_rank(
    ranks: Ranks, saved: tuple[Path, dict[str, Any]], tmp_path: Path, file: str
) -> None:
    shutil.copytree(saved[0], tmp_path / "job")
    path = tmp_path / "job" / checkpoint_folder(1) / file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert all(file in told for told in ranks.run(2, _damaged, tmp_path / "job"))
    with pytest.raises(CheckpointCorrupt, match=file):
        export_sharded(tmp_path / "job", 1, tmp_path / "x.safetensors")


def _one_cannot_write(folder: Path) -> str:
    held = Held(MeshShape(shard=2), seed=1)
    if dist.get_rank() == 1:
        held.buffers()["scale"].data = torch.zeros(1, dtype=torch.complex128)  # nobody can save it
        held._scale = {"other": held.buffers()["scale"]}
    with pytest.raises(CheckpointError) as caught:
        save_sharded(folder, 2, Trained(held, held.optimizer), ShardedInfo(1))
    return str(caught.value)


def test_a_failed_rank_fails_all_and_leaves_no_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    assert all(
        "other cannot be saved" in told for told in ranks.run(2, _one_cannot_write, tmp_path)
    )
    assert not DirectoryStore(tmp_path).latest() > 0


def _one_breaks() -> str:
    def work() -> None:
        if dist.get_rank() == 1:
            raise ZeroDivisionError("a defect")

    with pytest.raises((CheckpointError, ZeroDivisionError)) as caught:
        RankGroup(None).share(work)
    return repr(caught.value)


def test_any_error_of_a_rank_ends_the_wait_of_the_others(ranks: Ranks) -> None:
    first, second = ranks.run(2, _one_breaks)
    assert "rank 1: ZeroDivisionError: a defect" in first
    assert second == "ZeroDivisionError('a defect')"


# ------------------------------------------------------------------------- the trainer's own parts

GPT = '[model]\nname = "gpt"\nlayers = 2\nwidth = 24\nheads = 4\ncontext = 8\nvocab_size = 64\n'


class Divided:
    """A rank's part of a GPT as inner strategies make it, with its optimizer."""

    def __init__(self, shape: MeshShape, *, seed: int) -> None:
        spec = parse_spec(f"{GPT}[job]\nseed = {seed}\n")
        torch.manual_seed(seed)
        model: Any = build_model("gpt", **spec.model.options)
        self.ties = ties_of(model)
        optimizer = build_optimizer(model, spec.train)
        names = {p: name for name, p in model.named_parameters()}
        groups = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
        device = torch.device("cpu")
        self.parts = split_model(
            model, InnerOptions(shape=shape), mesh=build_mesh(shape, device=device), device=device
        )
        self.own = LocalShard(optimizer, self.parts.parameters(), groups=groups, state={})

    def whole(self) -> dict[str, Any]:
        """Return everything as lists of numbers by name, gathered."""
        found: dict[str, Any] = {}
        for name, parameter in self.parts.parameters().items():
            state = self.own.optimizer.state.get(self.own.steps_on[name], {})
            for key, value in {"": parameter.detach(), **state}.items():
                if isinstance(parameter, DTensor) and value.dim() and key:
                    value = as_part(value, like=parameter)
                full = value.full_tensor() if isinstance(value, DTensor) else value
                found[f"{name}/{key}"] = full.tolist()
        return found


def _save_parts(folder: Path, shape: MeshShape) -> dict[str, Any]:
    divided = Divided(shape, seed=1)
    ids = torch.arange(64).view(8, 8) % 64
    divided.parts.backward(ids, ids + 1 - 64 * (ids == 63).long())
    divided.own.step()
    options = parse_spec(GPT).model.options
    save_sharded(
        folder,
        1,
        Trained(divided.parts, divided.own.optimizer, steps_on=divided.own.steps_on),
        ShardedInfo(
            1,
            texts=describe("gpt", options=options, tokenizer=ByteTokenizer().to_json()),
            ties=divided.ties,
        ),
    )
    return divided.whole()


def _load_parts(folder: Path, shape: MeshShape) -> dict[str, Any]:
    divided = Divided(shape, seed=2)
    load_sharded(
        folder, 1, Trained(divided.parts, divided.own.optimizer, steps_on=divided.own.steps_on)
    )
    return divided.whole()


@pytest.mark.parametrize(
    "shape",
    [MeshShape(shard=4), MeshShape(pipeline=2, tensor=2), MeshShape(replicate=2), MeshShape()],
    ids=str,
)
@pytest.mark.every(3)
def test_parts_of_inner_strategies_go_on_under_any_mesh(
    ranks: Ranks, trained: tuple[Path, dict[str, Any]], shape: MeshShape
) -> None:
    folder, before = trained
    assert len(before) == 4 * 14
    assert _together(ranks.run(shape.ranks, _load_parts, folder, shape)) == before


@pytest.fixture(scope="module")
def trained(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A checkpoint of a GPT over four ranks in a square, after a step."""
    folder = tmp_path_factory.mktemp("trained") / "job"
    return folder, _together(ranks.run(4, _save_parts, folder, SQUARE))


def test_exported_parts_are_a_whole_gpt_that_can_write(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    export_sharded(trained[0], 1, tmp_path / "gpt.safetensors")
    model, tokenizer = load_model(tmp_path / "gpt.safetensors")
    assert write_text(model, tokenizer, "\x01", tokens=2, temperature=0.0, seed=1)
    for name, parameter in model.named_parameters():
        assert parameter.tolist() == trained[1][name + "/"]
