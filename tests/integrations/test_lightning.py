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
from atoll.errors import LeftBehind
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.group.single import SingleGroup
from atoll.run import Run
from atoll.run.place import Membership
from tests.e2e.conftest import Atoll
from tests.integrations.examples import assert_same, load, run_on_two_nodes, take_over

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
@pytest.mark.long("tests/loops/test_loops.py::test_together_members_end_with_one_model")
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


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_gradients_are_clipped_in_mixed_precision(
    tmp_path: Path, example: Any, precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clipped: list[float] = []
    clip = nn.utils.clip_grad_norm_

    def noted(parameters: Any, largest: float) -> Tensor:
        norm = clip(parameters, largest)
        clipped.append(float(norm))
        return norm

    monkeypatch.setattr(nn.utils, "clip_grad_norm_", noted)
    scaler = torch.amp.GradScaler("cpu") if precision == "16-mixed" else None
    plugin = pl.plugins.MixedPrecision(precision, "cpu", scaler)
    run = make_run(SingleGroup(), tmp_path, num_slots=1)
    trainer = fit(example, run, steps=6, plugins=[plugin])
    assert trainer.global_step == run.step == 6
    assert len(clipped) == 6
    assert max(clipped) < 100  # norms of gradients without the scale, 65,536 at first
    assert bool(vector(trainer.lightning_module).isfinite().all())


class Diary(pl.Callback):  # type: ignore[misc,name-defined]
    """Notes the learning rate of every step."""

    def __init__(self) -> None:
        self.rates: dict[int, float] = {}

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.rates[trainer.global_step] = optimizer.param_groups[0]["lr"]


def rejoin(
    example: Any, folder: Path, *, donor: Run | None = None, again_at: int = 0, **settings: Any
) -> tuple[Run, Diary, Any]:
    """Train a member; it takes over a donor's state at once, and again in a later step."""
    from atoll.integrations.lightning import AtollCallback

    class Module(example.NextLetter):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = run.wrap(
                self, torch.optim.AdamW(self.parameters(), 3e-3),
                outer=package.DiLoCo(every=3, outer_lr=0.5),
            )  # fmt: skip
            if donor is not None and not again_at:
                take_over(run, donor)
            elif donor is not None:
                leave_behind(optimizer, donor)
            by_step = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
            by_pass = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            kind = settings.get("by", "step")
            schedule = by_pass if kind == "epoch" else by_step
            return [optimizer], [{"scheduler": schedule, "interval": kind}]

    def leave_behind(optimizer: Any, donor: Run) -> None:
        sync = optimizer.outer.sync

        def left_behind(task: Any) -> Any:
            if task.step == again_at:
                raise LeftBehind("the group went on")
            return sync(task)

        optimizer.outer.sync = left_behind
        optimizer._recover = lambda error: take_over(run, donor)

    run, diary = make_run(SingleGroup(), folder, num_slots=1), Diary()
    limits = {name: settings[name] for name in ("max_steps", "max_epochs") if name in settings}
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, default_root_dir=str(folder), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accumulate_grad_batches=2, num_sanity_val_steps=0, limit_val_batches=0,
        log_every_n_steps=1, callbacks=[AtollCallback(run), diary], **limits,
    )  # fmt: skip
    # 10 batches are a pass of 5 steps.
    data = DataLoader(example.letters(4_000, 4_328), batch_size=32)
    trainer.fit(Module(run), data, data)
    return run, diary, trainer


@pytest.mark.parametrize(
    "settings", [{"max_steps": 15}, {"max_epochs": 3}, {"max_epochs": 3, "by": "epoch"}]
)
def test_a_member_that_joins_late_goes_on_at_the_groups_step(
    tmp_path: Path, example: Any, settings: dict[str, Any]
) -> None:
    _, expected, _ = rejoin(example, tmp_path / "whole", **settings)
    assert list(expected.rates) == list(range(15))
    donor, _, _ = rejoin(example, tmp_path / "donor", max_steps=9)
    run, diary, trainer = rejoin(example, tmp_path, donor=donor, **settings)
    assert list(diary.rates) == list(range(9, 15))
    assert trainer.global_step == run.step == 15
    if "by" not in settings:
        assert diary.rates == {step: expected.rates[step] for step in diary.rates}
    else:  # it begins its pass anew: its rate is that of the pass
        assert diary.rates[9] == expected.rates[9]


def test_a_member_that_recovers_goes_on_at_the_groups_step(tmp_path: Path, example: Any) -> None:
    _, expected, _ = rejoin(example, tmp_path / "whole", max_steps=12)
    donor, _, _ = rejoin(example, tmp_path / "donor", max_steps=9)
    run, diary, trainer = rejoin(example, tmp_path, max_steps=12, donor=donor, again_at=5)
    assert list(diary.rates) == [0, 1, 2, 3, 4, 9, 10, 11]
    assert {step: expected.rates[step] for step in diary.rates} == diary.rates
    assert trainer.global_step == run.step == 12


def test_a_member_that_joins_after_the_last_step_trains_none(tmp_path: Path, example: Any) -> None:
    donor, _, _ = rejoin(example, tmp_path / "donor", max_steps=6)
    run, diary, trainer = rejoin(example, tmp_path, max_steps=6, donor=donor)
    assert not diary.rates
    assert trainer.global_step == run.step == 6


def test_a_failed_validation_leaves_the_own_parameters(tmp_path: Path, example: Any) -> None:
    class Failing(pl.Callback):  # type: ignore[misc,name-defined]
        module: Any = None
        own: Any = None

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *more: Any) -> None:
            self.module, self.own = pl_module, vector(pl_module)

        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.global_step == 3:
                assert not torch.equal(vector(pl_module), self.own)
                raise ZeroDivisionError

    failing = Failing()
    run = make_run(SingleGroup(), tmp_path, num_slots=1)
    with pytest.raises(ZeroDivisionError):
        fit(example, run, callbacks=[failing], val_check_interval=2)
    assert torch.equal(vector(failing.module), failing.own)
