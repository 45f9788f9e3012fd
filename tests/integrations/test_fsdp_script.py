"""The example of a script in islands: processes started by torchrun, and by a hub."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

import atoll as package
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.group.single import SingleGroup
from atoll.run import Run
from atoll.run.place import Membership
from atoll.train.sharding import deal
from atoll.train.shares.sources import Division
from tests.e2e.conftest import Atoll
from tests.integrations.examples import EXAMPLES, assert_same, load
from tests.patience import PATIENCE_S

STEPS = 24
RANKS = 2
SEED = 7


@pytest.fixture(scope="module")
def example() -> Any:
    return load("fsdp_diloco")


def rows_of(example: Any, slot: int, *, members: int) -> Any:
    """Yield an island's batches: those of its ranks, one after the other."""
    shares = [
        deal(
            DataLoader(example.letters(4_000, 100_000), batch_size=32, shuffle=True),
            Division(slot, members, SEED, rank=rank, ranks=RANKS),
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    for parts in zip(*shares, strict=True):
        yield tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))


def native(
    example: Any, group: Group, model: nn.Module, *, folder: Path, members: int
) -> nn.Module:
    """Train a member as one process with the whole model and all rows of its island."""
    slot = int(group.me[1:])
    with Run(group, Membership(folder, seed=SEED, slot=slot, num_slots=members)) as run:
        inner = torch.optim.AdamW(model.parameters(), 3e-3)
        outer = package.DiLoCo(every=20, outer_lr=0.8, outer_momentum=0.5)
        optimizer = run.wrap(model, inner, outer=outer, codec="fp32")
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.998**step)
        stream = rows_of(example, slot, members=members)
        for _ in range(STEPS):
            inputs, targets = next(stream)
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            run.log(loss=loss, tokens=len(targets))
            optimizer.step()
            schedule.step()
    return model


def expected(example: Any, folder: Path, *, members: int) -> nn.Module:
    """Return what plain DiLoCo over whole models comes to."""
    models = [example.make_model() for _ in range(members)]  # not in threads: one seed for all
    if members == 1:
        return native(example, SingleGroup(), models[0], folder=folder, members=1)

    def body(group: Group) -> nn.Module:
        model = models[int(group.me[1:])]
        return native(example, group, model, folder=folder, members=members)

    return MemoryGroups(members).together(body)[0]


@pytest.mark.e2e
@pytest.mark.long("tests/island/script/test_script.py::test_a_spread_model_ends_as_the_whole_one")
def test_torchrun_alone_ends_as_the_whole_model(tmp_path: Path, example: Any) -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--nproc-per-node", str(RANKS), str(EXAMPLES / "fsdp_diloco.py"),
            "--steps", str(STEPS), "--codec", "fp32",
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished with held-out loss") == 1
    found = load_file(tmp_path / "model.safetensors")
    assert_same(found, expected(example, tmp_path, members=1), tolerance=1e-5)


@pytest.mark.e2e
@pytest.mark.long(
    "tests/island/script/test_script.py::test_an_island_takes_over_the_state_of_a_process"
)
def test_two_islands_end_as_two_whole_models(atoll: Atoll, tmp_path: Path, example: Any) -> None:
    done = atoll.run(
        "run", str(EXAMPLES / "fsdp_diloco.py"), "--local", "2", "--ranks", str(RANKS),
        "--", "--steps", str(STEPS), "--codec", "fp32")  # fmt: skip
    assert done.code == 0, done.both
    losses = [line.split()[-1] for line in done.out.splitlines() if "finished with" in line]
    assert len(losses) == 2
    assert len(set(losses)) == 1  # both islands end with one model
    atoll.assert_ended()
    found: dict[str, Tensor] = load_file(atoll.job_folder() / "model.safetensors")
    assert_same(found, expected(example, tmp_path, members=2), tolerance=1e-5)
