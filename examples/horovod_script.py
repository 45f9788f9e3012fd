"""A script written for Horovod, with one changed line; its members may be lost and come back.

Alone:                       python examples/horovod_script.py
On this machine, two nodes:  atoll run examples/horovod_script.py --local 2
On a hub's machines:         atoll run examples/horovod_script.py --nodes 4

The task: whether two of eight bits are equal.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import atoll.integrations.horovod as hvd  # it was: import horovod.torch as hvd


def data(count: int) -> TensorDataset:
    """Return samples of eight bits, and whether the first two are equal."""
    bits = torch.randint(0, 2, (count, 8), generator=torch.Generator().manual_seed(5))
    return TensorDataset(bits.float(), (bits[:, 0] == bits[:, 1]).long())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small net on equal bits.")
    parser.add_argument("--epochs", type=int, default=6)
    arguments = parser.parse_args()

    hvd.init()
    torch.manual_seed(7 + hvd.rank())  # members start differently, and are made equal below
    samples = data(2048)
    sampler: DistributedSampler[TensorDataset] = DistributedSampler(
        samples, num_replicas=hvd.size(), rank=hvd.rank()
    )
    loader = DataLoader(samples, batch_size=32, sampler=sampler)

    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.fp16
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        right, count = torch.zeros(1), torch.zeros(1)
        for inputs, targets in loader:
            optimizer.zero_grad()
            outputs = model(inputs)
            nn.functional.cross_entropy(outputs, targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            right += (outputs.argmax(1) == targets).sum()
            count += len(targets)
        share = hvd.allreduce(right, op=hvd.Sum) / hvd.allreduce(count, op=hvd.Sum)
        if hvd.rank() == 0:
            print(f"epoch {epoch}: {float(share):.1%} right on {hvd.members()} members", flush=True)
    total = sum(float(parameter.detach().double().sum()) for parameter in model.parameters())
    print(f"rank {hvd.rank()} of {hvd.size()} ends with {total:.12f}", flush=True)


if __name__ == "__main__":
    main()
