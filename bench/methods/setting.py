"""What all runs have in common: model, data, inner optimizer, length."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from atoll.config import TrainTable
from atoll.data import Dataset, Shards, load_dataset
from atoll.models import GPT, GPTConfig, Llama, LlamaConfig

SPLIT_SEED = 7
"""Of the held-out text, which is the same in all runs."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One scale at which methods are compared."""

    layers: int = 5
    width: int = 128
    context: int = 64
    batch: int = 4
    steps: int = 600
    lr: float = 1.5e-3
    held_out_tokens: int = 131_072
    """How much text one evaluation reads."""
    data: str = "stdlib"
    """Corpus, see `atoll.data.corpora`."""
    order: str = "shuffled"
    """`contiguous`: every member has one stretch of the text, of another kind than the others'."""
    llama: bool = False
    """Whether the model is a Llama instead of a GPT."""
    speeds: tuple[float, ...] = ()
    """Relative speeds of members that push to servers, by slot; empty: all are equal."""

    def table(self, changes: Mapping[str, Any]) -> TrainTable:
        """Return the inner optimizer, with what a method wants otherwise."""
        common = TrainTable(
            steps=self.steps, batch=self.batch, lr=self.lr, warmup=self.steps // 12,
            final_lr=0.02, clip=1.0,
        )  # fmt: skip
        return dataclasses.replace(common, **changes)

    def model(self, seed: int) -> GPT | Llama:
        """Return the model of a seed; the same on every member."""
        torch.manual_seed(seed)
        if self.llama:
            return Llama(
                LlamaConfig(
                    layers=self.layers, width=self.width, heads=4, kv_heads=2,
                    context=self.context,
                )
            )  # fmt: skip
        config = GPTConfig(layers=self.layers, width=self.width, heads=4, context=self.context)
        return GPT(config)

    def shards(self, seed: int, members: int) -> Shards:
        """Return the members' data."""
        return Shards(
            corpus(self.data).train, slots=members, context=self.context, seed=seed,
            order=self.order,
        )  # fmt: skip

    @property
    def tokens_per_node(self) -> int:
        """Tokens that every member is trained on."""
        return self.steps * self.batch * self.context


FULL = Setting()
QUICK = Setting(layers=2, width=64, steps=120, lr=8e-3, held_out_tokens=16_384)


@cache
def corpus(spec: str = "stdlib") -> Dataset:
    """Return a corpus, read once."""
    return load_dataset(spec, seed=SPLIT_SEED)
