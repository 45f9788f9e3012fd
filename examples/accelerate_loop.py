"""A loop with Hugging Face Accelerate on several computers, with gradient accumulation.

Alone:                       python examples/accelerate_loop.py
On this machine, two nodes:  atoll run examples/accelerate_loop.py --local 2
On a hub's machines:         atoll run examples/accelerate_loop.py --nodes 4 -- --steps 2000

Three lines are Atoll's, marked below. It needs: pip install 'atoll[train,hf]'
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import sysconfig

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import atoll

CONTEXT = 8
ALPHABET = 128


def letters(first: int, last: int) -> TensorDataset:
    """Return windows of the standard library's sources and the letter after each."""
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    text = "".join(path.read_text("utf-8", "replace") for path in sorted(folder.glob("[a-d]*.py")))
    numbers = torch.tensor([min(ord(letter), ALPHABET - 1) for letter in text[first:last]])
    windows = numbers.unfold(0, CONTEXT + 1, 1)
    return TensorDataset(windows[:, :-1], windows[:, -1])


def make_model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Embedding(ALPHABET, 16),
        nn.Flatten(),
        nn.Linear(16 * CONTEXT, 64),
        nn.ReLU(),
        nn.Linear(64, ALPHABET),
    )


def train(run: atoll.Run, *, steps: int) -> nn.Module:
    """Train for so many optimizer steps of two batches each."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = make_model()
    inner = torch.optim.AdamW(model.parameters(), 3e-3)
    optimizer = run.wrap(  # 2: a torch.optim.Optimizer that also agrees with the others
        model, inner, outer=atoll.DiLoCo(every=20, outer_lr=0.8, outer_momentum=0.5)
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.998**run.step)
    loader = DataLoader(run.shard(letters(4_000, 100_000)), batch_size=32)  # 3: this share
    prepared, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    batches = itertools.cycle(loader)
    while run.step < steps and not run.stopping:  # a member that joins late begins at run.step
        inputs, targets = next(batches)
        with accelerator.accumulate(prepared):
            loss = nn.functional.cross_entropy(prepared(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            run.log(loss=loss, tokens=len(targets))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    run.finish()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small net with Accelerate.")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    with atoll.join() as run:  # 1: alone when no hub started this
        model = train(run, steps=arguments.steps)
        run.save(model)
        inputs, targets = letters(0, 4_000).tensors
        with torch.no_grad():
            loss = nn.functional.cross_entropy(model(inputs), targets)
        print(f"finished with held-out loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
