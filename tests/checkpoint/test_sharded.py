"""Sharded models: saved by real ranks, loaded on as many as there are, exported as one file."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from atoll.checkpoint import DirectoryStore
from atoll.checkpoint.sharded import FORMAT, export_sharded, load_sharded, save_sharded
from atoll.errors import CheckpointCorrupt, CheckpointError, CheckpointMissing
from atoll.wire.keeping import Keep
from atoll.wire.manifest import MANIFEST_NAME, checkpoint_folder

TIMEOUT_S = 90

RANK = """
import hashlib, json, os, sys, warnings
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from atoll.checkpoint.sharded import load_sharded, save_sharded
from atoll.errors import AtollError

torch.set_num_threads(1)
tasks = json.loads(sys.stdin.readline())
children = []
for task in tasks:  # one import of torch for all ranks
    child = os.fork()
    if child == 0:
        break
    children.append(child)
else:
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
store = dist.FileStore(task["store"], task["ranks"])
dist.init_process_group("gloo", store=store, rank=task["rank"], world_size=task["ranks"],
                        timeout=timedelta(seconds=60))
torch.manual_seed(task.get("seed", 1))
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))
mesh = init_device_mesh("cpu", (task["ranks"],))
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
folder, answer = Path(task["folder"]), {}

def train(steps, start):
    for step in range(start, start + steps):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

def digest():
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_state_dict(model, optimizer, options=options)
    text = hashlib.sha256()
    def walk(value):
        if isinstance(value, torch.Tensor):
            text.update(value.contiguous().numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value):
                walk(value[key])
    walk(full[0]); walk(full[1])
    return text.hexdigest()

try:
    if task["do"] == "save":
        train(3, 0)
        manifest = save_sharded(folder, 1, model, optimizer, step=3, texts={"model": "net"},
                                numbers={"wall_s": 1.5})
        answer["parts"] = [part.name for part in manifest.parts]
    else:
        about = load_sharded(folder, 1, model, optimizer)
        answer["about"] = [about.step, about.texts, about.numbers]
    answer["digest"] = digest()
    train(2, 3)
    answer["after"] = digest()
except AtollError as error:
    answer["error"] = error.to_dict()
if task["rank"] == 0 or "error" in answer:
    os.write(1, json.dumps(answer).encode() + b"\\n")
dist.destroy_process_group()
os._exit(0)
"""


def ranks(folder: Path, do: str, count: int, *, seed: int = 1) -> list[dict[str, Any]]:
    """Run so many real processes; return what the first, and every failing one, said."""
    store = folder / f"store-{do}-{count}-{seed}"
    tasks = [
        {
            "store": str(store), "ranks": count, "rank": rank, "folder": str(folder / "job"),
            "do": do, "seed": seed,
        }
        for rank in range(count)
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RANK],
        input=json.dumps(tasks) + "\n", capture_output=True, text=True, timeout=TIMEOUT_S,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Save with two ranks."""
    folder = tmp_path_factory.mktemp("sharded")
    (answer,) = ranks(folder, "save", 2)
    return folder, answer


def test_manifest_names_and_hashes_every_file(saved: tuple[Path, dict[str, Any]]) -> None:
    folder, answer = saved
    assert set(answer["parts"]) == {".metadata", "about.json", "__0_0.distcp", "__1_0.distcp"}
    manifest = DirectoryStore(folder / "job").verify(1)
    assert manifest.versions["format"] == FORMAT
    assert (manifest.members, manifest.step) == (["rank0", "rank1"], 3)


@pytest.mark.parametrize("count", [1, 2])
def test_any_number_of_ranks_goes_on_from_it(
    saved: tuple[Path, dict[str, Any]], count: int
) -> None:
    folder, answer = saved
    (loaded,) = ranks(folder, "load", count, seed=7)
    assert loaded["about"] == [3, {"model": "net"}, {"wall_s": 1.5}]
    assert loaded["digest"] == answer["digest"]
    if count == 2:
        assert loaded["after"] == answer["after"]


def test_export_is_one_file_that_plain_torch_loads(
    saved: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = saved
    export_sharded(folder / "job", 1, tmp_path / "whole.safetensors")
    monkeypatch.setattr("atoll.checkpoint.sharded.EXPORT_BYTES", 1)
    export_sharded(folder / "job", 1, tmp_path / "pieces.safetensors")
    whole = (tmp_path / "whole.safetensors").read_bytes()
    assert whole == (tmp_path / "pieces.safetensors").read_bytes()
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))
    model.load_state_dict(load_file(tmp_path / "whole.safetensors"))
    torch.manual_seed(1)
    same = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))
    optimizer = torch.optim.AdamW(same.parameters(), lr=0.01)
    for step in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        same(x).square().mean().backward()
        optimizer.step()
    for name, value in same.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-5, atol=1e-6)


def test_damage_is_named_on_every_rank(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    shutil.copytree(saved[0] / "job", tmp_path / "job")
    path = tmp_path / "job" / checkpoint_folder(1) / "__1_0.distcp"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    answers = ranks(tmp_path, "load", 2)
    assert [answer["error"]["kind"] for answer in answers] == ["CheckpointCorrupt"] * 2
    assert all("__1_0.distcp" in answer["error"]["what"] for answer in answers)
    with pytest.raises(CheckpointCorrupt, match="__1_0"):
        export_sharded(tmp_path / "job", 1, tmp_path / "x.safetensors")


def net(*, width: int = 4) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_one_process_needs_no_group(tmp_path: Path) -> None:
    model, optimizer = net()
    save_sharded(tmp_path, 3, model, optimizer, step=30)
    other, its_optimizer = net()
    load_sharded(tmp_path, 3, other, its_optimizer)
    assert torch.equal(other.state_dict()["weight"], model.state_dict()["weight"])
    export_sharded(tmp_path, 3, tmp_path / "x.safetensors", texts={"note": "hello"})
    assert torch.equal(
        load_file(tmp_path / "x.safetensors")["weight"], model.state_dict()["weight"]
    )


def test_same_round_again_replaces_and_older_ones_go(tmp_path: Path) -> None:
    for round_ in (1, 2, 2, 3):
        model, optimizer = net()
        save_sharded(tmp_path, round_, model, optimizer, step=round_, keep=Keep(newest=2))
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["round-000002", "round-000003"]
    other, its_optimizer = net()
    load_sharded(tmp_path, 3, other, its_optimizer)
    assert torch.equal(other.state_dict()["weight"], model.state_dict()["weight"])


def test_what_is_missing_or_of_another_kind_or_model_is_told(tmp_path: Path) -> None:
    model, optimizer = net()
    with pytest.raises(CheckpointMissing, match="round 1"):
        load_sharded(tmp_path, 1, model, optimizer)
    save_sharded(tmp_path, 1, model, optimizer, step=1)
    wider, its_optimizer = net(width=5)
    with pytest.raises(CheckpointError, match="does not fit this model"):
        load_sharded(tmp_path, 1, wider, its_optimizer)
    manifest = tmp_path / checkpoint_folder(1) / MANIFEST_NAME
    manifest.write_bytes(manifest.read_bytes().replace(FORMAT.encode(), b"other"))
    with pytest.raises(CheckpointMissing, match="not a sharded one"):
        load_sharded(tmp_path, 1, model, optimizer)
