"""What trainers test themselves with, from their installed packages, on a wrapped optimizer."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

import atoll as package
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.group.single import SingleGroup
from atoll.run import Run
from atoll.run.place import Membership
from tests.integrations.examples import assert_same

pytestmark = [
    # What Lightning itself calls that torch is about to take away, and its advice.
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The '.*dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader` but have no"),
]
METHODS = pytest.mark.parametrize("outer", [package.Average(every=2), "ddp"], ids=["mean", "ddp"])
"""Those that do not change what a member alone computes."""

Wrap = Callable[[nn.Module, Optimizer], Optimizer]


def make_run(folder: Path, group: Group | None = None, *, num_slots: int = 1) -> Run:
    group = group or SingleGroup()
    return Run(group, Membership(folder, slot=int(group.me[1:]), num_slots=num_slots))


def not_wrapped(model: nn.Module, optimizer: Optimizer) -> Optimizer:
    return optimizer


def wrapped(folder: Path, outer: Any) -> Wrap:
    return lambda model, optimizer: make_run(folder).wrap(model, optimizer, outer=outer)


def kept(model: nn.Module) -> dict[str, Tensor]:
    return copy.deepcopy(model.state_dict())


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


# -------------------------------------------------------------------------------- Accelerate


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Accelerate's scripts, with a clean state of the library before and after."""
    pytest.importorskip("accelerate", reason="pip install 'atoll[hf]'")
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.test_utils.scripts import test_script, test_sync

    def reset() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    reset()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    yield SimpleNamespace(training=test_script, accumulation=test_sync)
    reset()


def joined(wrap: Wrap, models: list[nn.Module], *, deal: Callable[[Any], Any] | None = None) -> Any:
    """Return an `Accelerator` that first does what a user adds to a script.

    It wraps the optimizer and, with `deal`, takes a share of the data. It notes the models.
    """
    from accelerate import Accelerator

    class Joined(Accelerator):  # type: ignore[misc]
        def prepare(self, *things: Any, **options: Any) -> Any:
            if any(isinstance(thing, Optimizer) for thing in things):
                (model,) = (thing for thing in things if isinstance(thing, nn.Module))
                models.append(model)
                things = tuple(wrap(model, t) if isinstance(t, Optimizer) else t for t in things)
                things = tuple(self.share(t) if isinstance(t, DataLoader) else t for t in things)
            return super().prepare(*things, **options)

        def share(self, loader: Any) -> Any:
            if deal is None:
                return loader
            size = loader.batch_size // (2 if self.split_batches else 1)
            order = range(len(loader.dataset))  # members take turns in an order of the script's
            return deal(DataLoader(loader.dataset, batch_size=size, sampler=order))

    return Joined


@METHODS
@pytest.mark.parametrize("seedable", [False, True], ids=["generator", "seedable-sampler"])
@pytest.mark.every(3)
def test_accelerate_trains_as_a_plain_loop(
    scripts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outer: Any,
    seedable: bool,
) -> None:  # fmt: skip
    """Its script compares each training with a bare loop, also in mixed precision."""
    models: list[nn.Module] = []
    ours = joined(wrapped(tmp_path, outer), models)
    monkeypatch.setattr(scripts.training, "Accelerator", ours)
    ours()  # the script asks for the state first
    scripts.training.training_check(use_seedable_sampler=seedable)
    assert len(models) >= 2


@pytest.mark.parametrize("outer", [package.Average(every=1), "ddp"], ids=["mean", "ddp"])
def test_two_members_pass_accelerates_check_of_two_processes(
    scripts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outer: Any
) -> None:
    """They end as one process with twice the batch: a step of SGD is linear in the gradients."""
    script, models, here = scripts.training, list[nn.Module](), threading.local()

    def wrap(model: nn.Module, optimizer: Optimizer) -> Optimizer:
        here.run = make_run(tmp_path, next(here.groups), num_slots=2)
        changed: Optimizer = here.run.wrap(model, optimizer, outer=outer)
        return changed

    ours = joined(wrap, models, deal=lambda loader: here.run.shard(loader))
    ours()
    monkeypatch.setattr(script, "Accelerator", ours)
    monkeypatch.setattr(script, "AcceleratorState", lambda: SimpleNamespace(num_processes=2))
    monkeypatch.setattr(
        script, "generate_baseline_dataloader",
        lambda data, generator, size, seedable: DataLoader(data, batch_size=size),  # in order
    )  # fmt: skip
    # Mixed precision would make the library's state anew, which members in threads share.
    monkeypatch.setattr(script, "is_bf16_available", lambda: False)
    monkeypatch.setattr(script, "is_fp16_available", lambda: False)
    worlds = [MemoryGroups(2), MemoryGroups(2)]  # the script trains twice

    def body(group: Group) -> None:
        here.groups = iter([world[int(group.me[1:])] for world in worlds])
        script.training_check()

    worlds[0].together(body)
    assert len(models) == 4
    for model in models:
        assert_same(kept(models[0]), model)


@METHODS
def test_accelerates_accumulation_and_schedule(
    scripts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outer: Any
) -> None:
    """Its script compares the rates; the parameters, too, are those without Atoll."""
    script = scripts.accumulation
    same_points = partial(script.RegressionDataset, seed=1)  # it draws others each time
    monkeypatch.setattr(script, "RegressionDataset", same_points)

    def trained(wrap: Wrap) -> list[dict[str, Tensor]]:
        models: list[nn.Module] = []
        monkeypatch.setattr(script, "Accelerator", joined(wrap, models))
        for split in (False, True):
            script.test_gradient_accumulation_with_opt_and_scheduler(split)
        return [kept(model) for model in models]

    expected, found = trained(not_wrapped), trained(wrapped(tmp_path, outer))
    assert len(expected) == 2
    for one, other in zip(found, expected, strict=True):
        assert_equal(one, other)


# --------------------------------------------------------------------------------- Lightning


def boring(name: str, wrap: Wrap, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return one of Lightning's models for tests; its optimizers are wrapped as they are made."""
    classes = pytest.importorskip(
        "lightning.pytorch.demos.boring_classes", reason="pip install 'atoll[lightning]'"
    )
    kind: Any = getattr(classes, name)

    class Joined(kind):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            with monkeypatch.context() as patch:
                for made in (torch.optim.SGD, torch.optim.Adam):
                    patch.setattr(
                        torch.optim, made.__name__,
                        lambda *a, _made=made, **b: wrap(self, _made(*a, **b)),
                    )  # fmt: skip
                return super().configure_optimizers()

    return Joined()


def fit(model: Any, folder: Path, *, data: Any = None, callbacks: Any = ()) -> tuple[Any, Any]:
    """Train as Lightning's own tests do; return the losses of the steps, and the parameters."""
    import lightning.pytorch as pl

    losses: list[float] = []

    class Note(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
            losses.append(float(outputs["loss"]))

    trainer = pl.Trainer(
        max_epochs=2, limit_train_batches=8, limit_val_batches=2, accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=str(folder), callbacks=[Note(), *callbacks],
    )  # fmt: skip
    trainer.fit(model, **({} if data is None else data))
    return losses, kept(model)


@METHODS
@pytest.mark.parametrize(
    ("model", "module"),
    [
        ("BoringModel", ""),
        ("BoringModel", "BoringDataModule"),
        ("BoringModel", "BoringDataModuleNoLen"),
        ("ManualOptimBoringModel", ""),
        ("DemoModel", "BoringDataModule"),
    ],
)
@pytest.mark.every(3)
def test_lightnings_boring_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outer: Any, model: str, module: str
) -> None:
    classes = pytest.importorskip("lightning.pytorch.demos.boring_classes")
    from atoll.integrations.lightning import AtollCallback

    def trained(*, ours: bool) -> tuple[list[float], dict[str, Tensor]]:
        torch.manual_seed(1)
        run = make_run(tmp_path)
        wrap = (lambda m, o: run.wrap(m, o, outer=outer)) if ours else not_wrapped
        data = {"datamodule": getattr(classes, module)()} if module else None
        callbacks = [AtollCallback(run)] if ours else []
        done = fit(boring(model, wrap, monkeypatch), tmp_path, data=data, callbacks=callbacks)
        assert run.step == (16 if ours else 0)
        return done

    expected, parameters = trained(ours=False)
    assert len(expected) == 16
    assert expected[0] != expected[-1]
    found, after = trained(ours=True)
    assert found == expected
    assert_equal(after, parameters)


# ------------------------------------------------------------------------------ transformers


class Regression(nn.Module):
    """The model of the Trainer's own tests, on the model and the data that Accelerate ships."""

    def __init__(self) -> None:
        super().__init__()
        from accelerate.test_utils import RegressionModel

        self.model = RegressionModel()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        found = self.model(x)
        return (found,) if labels is None else (nn.functional.mse_loss(found, labels), found)


class Points:
    """64 points of a line, as the Trainer's own tests have them."""

    def __init__(self) -> None:
        from accelerate.test_utils import RegressionDataset

        self._points = RegressionDataset(length=64, seed=42)

    def __len__(self) -> int:
        return len(self._points)

    def __getitem__(self, index: int) -> dict[str, Any]:
        point = self._points[index]
        return {"x": point["x"], "labels": point["y"]}


def regress(
    folder: Path, *, outer: Any = None, resume: Path | None = None, **changes: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Train as the Trainer's own tests do; return the logged losses, and the parameters."""
    transformers = pytest.importorskip("transformers", reason="pip install 'atoll[hf]'")
    from atoll.integrations.transformers import AtollCallback

    run, model = make_run(folder), Regression()
    optimizer: Any = torch.optim.AdamW(model.parameters(), 0.1)
    callbacks: list[Any] = []
    if outer is not None:
        optimizer = run.wrap(model, optimizer, outer=outer)
        callbacks.append(AtollCallback(run))
    options: dict[str, Any] = {
        "num_train_epochs": 3, "per_device_train_batch_size": 8, "logging_steps": 1,
        "eval_strategy": "epoch", "save_strategy": "no", "use_cpu": True, "report_to": [],
        "disable_tqdm": True, "output_dir": str(folder),
    }  # fmt: skip
    trainer = transformers.Trainer(
        model, transformers.TrainingArguments(**{**options, **changes}), train_dataset=Points(),
        eval_dataset=Points(), optimizers=(optimizer, None), callbacks=callbacks,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=str(resume) if resume is not None else None)
    assert outer is None or run.step == trainer.state.global_step
    history = trainer.state.log_history
    logged = [entry[name] for entry in history for name in ("loss", "eval_loss") if name in entry]
    return logged, kept(model)


@METHODS
@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
        {"bf16": True},
        {"lr_scheduler_type": "cosine", "warmup_steps": 4, "weight_decay": 0.1},
        {"max_steps": 10, "eval_strategy": "steps", "eval_steps": 2},
    ],
    ids=["accumulated", "bf16", "cosine", "max-steps"],
)
@pytest.mark.every(3)
def test_the_trainers_regression(tmp_path: Path, outer: Any, changes: dict[str, Any]) -> None:
    losses, parameters = regress(tmp_path, **changes)
    assert losses[-1] < losses[0]
    found, after = regress(tmp_path, outer=outer, **changes)
    assert found == losses
    assert_equal(after, parameters)


@METHODS
def test_the_trainer_resumes_from_its_own_checkpoint(tmp_path: Path, outer: Any) -> None:
    """As its own test: a training that goes on from a checkpoint ends as one without a break."""
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 10}
    _, expected = regress(tmp_path / "bare", **saving)
    _, whole = regress(tmp_path, outer=outer, **saving)
    assert_equal(whole, expected)
    _, resumed = regress(tmp_path, outer=outer, resume=tmp_path / "checkpoint-10", **saving)
    assert_equal(resumed, expected)
