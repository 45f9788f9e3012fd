"""The same training, written for other libraries' loops. Each imports its library when it runs."""

from __future__ import annotations

import importlib
import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.loops.job import Diary, Ended
from tests.loops.plain_loops import BATCH, Numbered, adamw, net, squared

REQUESTS = threading.RLock()
"""Held while Lightning asks for a data loader."""


class WithLoss(nn.Module):
    """A model as `transformers.Trainer` wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.seen: list[int] = []

    def forward(self, numbers: Tensor, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.seen += numbers.tolist()
        return {"loss": squared(self.net(x), labels)}


def collate(rows: list[Any]) -> dict[str, Tensor]:
    numbers, xs, ys = zip(*rows, strict=True)
    return {"numbers": torch.tensor(numbers), "x": torch.stack(xs), "labels": torch.stack(ys)}


def trainer(run: Any, diary: Diary) -> Ended:
    """`transformers.Trainer`, which shuffles the data and makes the schedule itself."""
    import transformers

    from tests.loops.job import Bare

    model = WithLoss()
    optimizer = run.wrap(model, adamw(model), outer=diary.method)

    class Note(transformers.TrainerCallback):
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            diary.step(model.seen, optimizer.param_groups[0]["lr"])
            model.seen.clear()

    callbacks: list[Any] = [Note()]
    if not isinstance(run, Bare):
        from atoll.integrations.transformers import AtollCallback

        callbacks.append(AtollCallback(run))
    arguments = transformers.TrainingArguments(
        output_dir=str(run.directory / "trainer"), num_train_epochs=1, use_cpu=True,
        per_device_train_batch_size=BATCH, save_strategy="no", report_to=[], disable_tqdm=True,
        remove_unused_columns=False, lr_scheduler_type="constant", max_grad_norm=0.0,
    )  # fmt: skip
    transformers.Trainer(
        model, arguments, train_dataset=run.shard(Numbered()), data_collator=collate,
        optimizers=(optimizer, None), callbacks=callbacks,
    ).train()  # fmt: skip
    return Ended(model)


def lightning(run: Any, diary: Diary) -> Ended:
    import lightning.pytorch as pl

    from tests.loops.job import Bare

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any, index: int) -> Any:
            self.now = batch[0].tolist()
            return squared(self.net(batch[1]), batch[2])

        def configure_optimizers(self) -> Any:
            return run.wrap(self, adamw(self), outer=diary.method)

    class Note(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
            diary.step(pl_module.now, trainer.optimizers[0].param_groups[0]["lr"])

    callbacks: list[Any] = [Note()]
    if not isinstance(run, Bare):
        from atoll.integrations.lightning import AtollCallback

        callbacks.insert(0, AtollCallback(run))
    module = Module()
    _request_loaders_one_at_a_time()
    pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks,
        default_root_dir=str(run.directory),
    ).fit(module, run.shard(DataLoader(Numbered(), batch_size=BATCH)))  # fmt: skip
    return Ended(module)


def _request_loaders_one_at_a_time() -> None:
    """Keep members that are threads apart; a member of a real job is a process.

    Lightning exchanges methods of the class `DataLoader` while it asks for a loader.
    """
    fit_loop: Any = importlib.import_module("lightning.pytorch.loops.fit_loop")
    with REQUESTS:
        requested = fit_loop._request_dataloader
        if not hasattr(requested, "one_at_a_time"):

            def request(source: Any) -> Any:
                with REQUESTS:
                    return requested(source)

            request.one_at_a_time = True  # type: ignore[attr-defined]
            fit_loop._request_dataloader = request


def accelerated(run: Any, diary: Diary) -> Ended:
    from accelerate import Accelerator

    model = net()
    accelerator = Accelerator(cpu=True)
    wrapped = run.wrap(model, adamw(model), outer=diary.method)
    model, optimizer = accelerator.prepare(model, wrapped)
    for numbers, x, y in run.shard(DataLoader(Numbered(), batch_size=BATCH)):
        optimizer.zero_grad()
        accelerator.backward(squared(model(x), y))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        diary.step(numbers, optimizer.param_groups[0]["lr"])
    return Ended(model)
