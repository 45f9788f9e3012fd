"""A data set without a length, shared out by `run.shard`, in transformers' Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.run import Run
from atoll.run.place import Membership

transformers = pytest.importorskip("transformers", reason="pip install 'atoll[hf]'")

SAMPLES, BATCH = 48, 4


class Numbers(IterableDataset[Any]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter({"x": torch.tensor([float(n)])} for n in range(SAMPLES))


class Noting(nn.Module):
    """A model that notes which samples it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(1, 1), list[int]()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.seen += x[:, 0].int().tolist()
        return {"loss": self.layer(x / SAMPLES).square().mean()}


def test_the_trainer_takes_the_share_of_a_stream(tmp_path: Path) -> None:
    def body(group: Group) -> list[int]:
        folder = tmp_path / group.me
        with Run(group, Membership(folder, slot=int(group.me[1:]), num_slots=2)) as run:
            model = Noting()
            inner = torch.optim.SGD(model.parameters(), lr=1e-3)
            arguments = transformers.TrainingArguments(
                output_dir=str(folder), max_steps=SAMPLES // 2 // BATCH, report_to=[],
                per_device_train_batch_size=BATCH, save_strategy="no", use_cpu=True,
                disable_tqdm=True,
            )  # fmt: skip
            transformers.Trainer(
                model, arguments, train_dataset=run.shard(Numbers()),
                optimizers=(run.wrap(model, inner, outer="local-sgd"), None),
            ).train()  # fmt: skip
        return model.seen

    # One after the other: a Trainer keeps state of the process.
    first, second = (body(MemoryGroups(1, ids=[name])[0]) for name in ("w0", "w1"))
    assert sorted(first + second) == list(range(SAMPLES))
