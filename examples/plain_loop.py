"""A plain PyTorch loop: the same file trains alone, or on several computers that sometimes agree.

Alone:                       python examples/plain_loop.py
On this machine, two nodes:  atoll run examples/plain_loop.py --local 2
On a hub's machines:         atoll run examples/plain_loop.py --nodes 4 -- --steps 2000

Three lines are Atoll's, marked below. The task: which letter comes next, given the last eight, in
the text of the Python standard library's own documentation strings.
"""

from __future__ import annotations

import argparse
import pathlib
import sysconfig

import torch
from torch import Tensor, nn

import atoll

CONTEXT = 8
ALPHABET = 128


def letters(limit: int = 400_000) -> Tensor:
    """Return the first characters of some of the standard library's sources, as numbers."""
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    text = "".join(path.read_text("utf-8", "replace") for path in sorted(folder.glob("[a-d]*.py")))
    return torch.tensor([min(ord(letter), ALPHABET - 1) for letter in text[:limit]])


def batches(data: Tensor, *, size: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return every window of the text once, in an order of its own for each seed."""
    windows = data.unfold(0, CONTEXT + 1, 1)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))
    return [(windows[i, :-1], windows[i, -1]) for i in torch.split(order, size)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small net to guess the next letter.")
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()

    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Embedding(ALPHABET, 16),
        nn.Flatten(),
        nn.Linear(16 * CONTEXT, 128),
        nn.ReLU(),
        nn.Linear(128, ALPHABET),
    )
    data = batches(letters(), size=64, seed=7)

    with atoll.join() as run:  # 1: alone when no hub started this
        optimizer = run.wrap(  # 2: a torch.optim.Optimizer that also agrees with the others
            model, torch.optim.AdamW(model.parameters(), 2e-3), outer=atoll.DiLoCo(every=50)
        )
        for step, (inputs, targets) in enumerate(run.shard(data)):  # 3: this member's share
            if step == arguments.steps or run.stopping:
                break
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if step % 50 == 0:
                print(f"step {step}  loss {loss.item():.3f}", flush=True)
        print(f"finished with loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
