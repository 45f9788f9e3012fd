"""FSDP inside each machine, DiLoCo with int8 between the machines: one loop, several processes.

Alone:                         python examples/fsdp_diloco.py
Two processes, no hub:         torchrun --nproc-per-node 2 examples/fsdp_diloco.py
Two islands of two processes:  atoll run examples/fsdp_diloco.py --local 2 --ranks 2
On a hub's machines:           atoll run examples/fsdp_diloco.py --nodes 4 --ranks 8 -- --steps 2000

The processes of a machine are the ranks of one island: each holds a part of every parameter, and
they meet in every step. Islands meet every 20 steps, and send each parameter once. With
accelerators the ranks use one each, and NCCL; the file is the same. The task: which letter comes
next, given the last eight, in the sources of Python's standard library.
"""

from __future__ import annotations

import argparse
import pathlib
import sysconfig
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
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


def make_model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Embedding(ALPHABET, 16),
        nn.Flatten(),
        nn.Linear(16 * CONTEXT, 64),
        nn.ReLU(),
        nn.Linear(64, ALPHABET),
    )


def train(run: atoll.Run, *, steps: int, codec: str) -> nn.Module:
    model = make_model().to(run.device)
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=run.mesh["shard"])  # 2: the ranks of this island
    fully_shard(model, mesh=run.mesh["shard"])
    inner = torch.optim.AdamW(model.parameters(), 3e-3)
    outer = atoll.DiLoCo(every=20, outer_lr=0.8, outer_momentum=0.5)
    optimizer = run.wrap(model, inner, outer=outer, codec=codec)  # 3: and the other islands
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.998**step)
    loader = DataLoader(letters(4_000, 100_000), batch_size=32, shuffle=True)
    for step, (inputs, targets) in enumerate(run.shard(loader)):  # 4: this rank's share
        if step == steps or run.stopping:
            break
        loss = nn.functional.cross_entropy(model(inputs.to(run.device)), targets.to(run.device))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        run.log(loss=loss, tokens=len(targets))
        optimizer.step()
        schedule.step()
    run.finish()
    return cast(nn.Module, model)


def held_out_loss(run: atoll.Run, model: nn.Module) -> float:
    """Return the loss on text that nobody trained on; every rank computes it."""
    inputs, targets = (tensor.to(run.device) for tensor in letters(0, 4_000).tensors)
    with torch.no_grad():
        loss: Any = nn.functional.cross_entropy(model(inputs), targets)
    return float(loss)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small net with FSDP and DiLoCo.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--codec", default="int8", help="how islands send what has changed")
    arguments = parser.parse_args()
    with atoll.join() as run:  # 1: this process among the ranks of its island
        model = train(run, steps=arguments.steps, codec=arguments.codec)
        run.save(model)
        loss = held_out_loss(run, model)
        if run.rank == 0:
            print(f"finished with held-out loss {loss:.3f}", flush=True)


if __name__ == "__main__":
    main()
