"""Lightning's Trainer on several computers: a small net that guesses the next letter.

Alone:                       python examples/lightning_trainer.py
On this machine, two nodes:  atoll run examples/lightning_trainer.py --local 2
On a hub's machines:         atoll run examples/lightning_trainer.py --nodes 4 -- --steps 2000

Four lines are Atoll's, marked below. It needs: pip install 'atoll[train,lightning]'
"""

from __future__ import annotations

import argparse
import pathlib
import sysconfig
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import atoll
from atoll.integrations.lightning import AtollCallback

CONTEXT = 8
ALPHABET = 128


def letters(first: int, last: int) -> TensorDataset:
    """Return windows of the standard library's sources and the letter after each."""
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    text = "".join(path.read_text("utf-8", "replace") for path in sorted(folder.glob("[a-d]*.py")))
    numbers = torch.tensor([min(ord(letter), ALPHABET - 1) for letter in text[first:last]])
    windows = numbers.unfold(0, CONTEXT + 1, 1)
    return TensorDataset(windows[:, :-1], windows[:, -1])


class NextLetter(LightningModule):
    """The net; `run` keeps it together with those of the others."""

    def __init__(self, run: atoll.Run) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.run = run
        self.net = nn.Sequential(
            nn.Embedding(ALPHABET, 16),
            nn.Flatten(),
            nn.Linear(16 * CONTEXT, 64),
            nn.ReLU(),
            nn.Linear(64, ALPHABET),
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("held_out", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        inner = torch.optim.AdamW(self.parameters(), 3e-3)
        optimizer = self.run.wrap(  # 2: a torch.optim.Optimizer that also agrees with the others
            self, inner, outer=atoll.DiLoCo(every=20, outer_lr=0.8, outer_momentum=0.5)
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.998**step)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def make_trainer(run: atoll.Run, *, steps: int, callbacks: Any = (), **more: Any) -> Trainer:
    ours = AtollCallback(run, tokens=lambda batch: len(batch[1]))  # 3: ends with the job
    settings: dict[str, Any] = {
        "accelerator": "cpu", "devices": 1, "default_root_dir": str(run.directory),
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False,
    }  # fmt: skip
    return Trainer(
        max_steps=steps, accumulate_grad_batches=2, gradient_clip_val=1.0,
        callbacks=[ours, *callbacks], **(settings | more),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small net with Lightning.")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    with atoll.join() as run:  # 1: alone when no hub started this
        module = NextLetter(run)
        share = run.shard(letters(4_000, 100_000))  # 4: this member's share
        held_out = DataLoader(letters(0, 4_000), batch_size=256)
        trainer = make_trainer(run, steps=arguments.steps)
        trainer.fit(module, DataLoader(share, batch_size=32), held_out)
        run.save(module.net)
        (found,) = trainer.validate(module, held_out, verbose=False)
        print(f"finished with held-out loss {found['held_out']:.3f}", flush=True)


if __name__ == "__main__":
    main()
