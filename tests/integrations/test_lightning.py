"""Lightning's Trainer with a wrapped optimizer and the callback."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import atoll as package
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.group.single import SingleGroup
from atoll.run import Run
from atoll.run.place import Membership
from tests.e2e.conftest import Atoll
from tests.integrations.examples import assert_same, load, run_on_two_nodes

pl = pytest.importorskip("lightning.pytorch", reason="pip install 'atoll[lightning]'")
pytestmark = [
    # What Lightning itself calls that torch is about to take away, and its advice about loaders.
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The '.*dataloader' does not have many workers"),
]
STEPS = 24


def make_run(group: Group, folder: Path, *, num_slots: int = 2) -> Run:
    return Run(group, Membership(folder, slot=int(group.me[1:]), num_slots=num_slots))


def vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.fixture(scope="module")
def example() -> Any:
    return load("lightning_trainer")


@pytest.mark.e2e
def test_two_processes_end_as_the_native_loop(atoll: Atoll, tmp_path: Path, example: Any) -> None:
    groups = MemoryGroups(2)
    runs = [make_run(group, tmp_path) for group in groups]
    nets = [example.NextLetter(run).net for run in runs]

    def native(group: Group) -> None:
        slot = int(group.me[1:])
        with runs[slot] as run:
            net = nets[slot]
            inner = torch.optim.AdamW(net.parameters(), 3e-3)
            outer = package.DiLoCo(every=20, outer_lr=0.8, outer_momentum=0.5)
            optimizer = run.wrap(net, inner, outer=outer)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.998**step)
            stream = iter(DataLoader(run.shard(example.letters(4_000, 100_000)), batch_size=32))
            for _ in range(STEPS):
                optimizer.zero_grad()
                for inputs, targets in itertools.islice(stream, 2):
                    run.log(tokens=len(targets))
                    loss = nn.functional.cross_entropy(net(inputs), targets)
                    (loss / 2).backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                schedule.step()

    groups.together(native)
    assert torch.equal(vector(nets[0]), vector(nets[1]))
    assert_same(run_on_two_nodes(atoll, "lightning_trainer", steps=STEPS), nets[0])


def fit(example: Any, run: Run, *, steps: int = 10, callbacks: Any = (), **settings: Any) -> Any:
    """Train one member; a round after every fourth step."""

    class Module(example.NextLetter):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            inner = torch.optim.AdamW(self.parameters(), 3e-3)
            outer = package.DiLoCo(every=4, outer_lr=0.5, outer_momentum=0.0)
            return self.run.wrap(self, inner, outer=outer)

    module = Module(run)
    trainer = example.make_trainer(run, steps=steps, callbacks=callbacks, **settings)
    loader = DataLoader(example.letters(4_000, 20_000), batch_size=32)
    held_out = DataLoader(example.letters(0, 2_000), batch_size=256)
    trainer.fit(module, loader, held_out)
    return trainer


class Losses(pl.Callback):  # type: ignore[misc,name-defined]
    """Notes every validation's loss by the step it came after."""

    def __init__(self) -> None:
        self.found: dict[int, float] = {}

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.found[trainer.global_step] = float(trainer.callback_metrics["held_out"])


def test_it_validates_the_agreed_parameters(tmp_path: Path, example: Any) -> None:
    losses = Losses()
    run = make_run(SingleGroup(), tmp_path, num_slots=1)
    # Two batches make a step, so every second one is validated after.
    fit(example, run, callbacks=[losses], val_check_interval=2)
    found = losses.found
    assert found[1] == found[2] == found[3]
    assert found[3] != found[4]
    assert found[4] == found[5] == found[6] == found[7]


def test_checkpoints_hold_the_agreed_parameters(tmp_path: Path, example: Any) -> None:
    quiet = fit(example, make_run(SingleGroup(), tmp_path / "quiet", num_slots=1))
    saver = pl.callbacks.ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=3, save_top_k=-1)
    run = make_run(SingleGroup(), tmp_path, num_slots=1)
    trainer = fit(example, run, callbacks=[saver], enable_checkpointing=True)
    assert torch.equal(vector(quiet.lightning_module), vector(trainer.lightning_module))
    first = min(tmp_path.glob("*.ckpt"), key=lambda path: int(path.stem.partition("step=")[2]))
    kept = torch.load(first, weights_only=True)
    assert kept["global_step"] == 3
    start = example.NextLetter(run).state_dict()
    for name, value in kept["state_dict"].items():
        assert torch.equal(value, start[name])  # no round before step 4
    assert kept["optimizer_states"][0]["atoll"]["step"] == 3


def test_it_stops_when_the_job_does(tmp_path: Path, example: Any) -> None:
    group = MemoryGroups(1)[0]

    class Stop(pl.Callback):  # type: ignore[misc,name-defined]
        def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            group.stopping = trainer.global_step == 5

    trainer = fit(example, make_run(group, tmp_path), steps=50, callbacks=[Stop()])
    assert trainer.global_step in (5, 6)
