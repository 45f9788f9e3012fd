"""What all runs have in common: model, data, inner optimizer, length."""

from __future__ import annotations

import argparse
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
    device: str = "cpu"
    """What all members compute on; rounds are in main memory in any case."""

    @property
    def scale(self) -> str:
        """Name what a run is about, besides method, members, seed and steps."""
        kind = "llama" if self.llama else "gpt"
        return (
            f"{kind} {self.layers}x{self.width}, {self.batch}x{self.context} of {self.data},"
            f" {self.device.partition(':')[0]}"
        )

    def table(self, changes: Mapping[str, Any]) -> TrainTable:
        """Return the inner optimizer, with what a method wants otherwise."""
        common = TrainTable(
            steps=self.steps, batch=self.batch, lr=self.lr, warmup=self.steps // 12,
            final_lr=0.02, clip=1.0,
        )  # fmt: skip
        return dataclasses.replace(common, **changes)

    def model(self, seed: int) -> GPT | Llama:
        """Return the model of a seed in main memory; the same on every member."""
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
SIZES = {"0.1M": QUICK, "1M": FULL, "10M": Setting(layers=6, width=384, lr=1e-3)}
"""Parameters -> the setting of that size."""


def add_arguments(parser: argparse.ArgumentParser, *, size: str) -> None:
    """Let a command choose how large runs are, and on what they compute."""
    parser.add_argument("--size", choices=SIZES, default=size, help="parameters of the model")
    parser.add_argument("--batch", type=int, default=0, help="sequences of a member's step")
    parser.add_argument("--context", type=int, default=0, help="bytes of a sequence")
    parser.add_argument("--data", default="", help="corpus; the standard library's sources")
    parser.add_argument("--device", default="cpu", help="what members compute on: cuda, mps, ...")
    parser.add_argument("--steps", type=int, default=0, help="optimizer steps of every member")


def setting_of(given: argparse.Namespace) -> Setting:
    """Return the setting that was chosen."""
    chosen = {
        name: getattr(given, name)
        for name in ("batch", "context", "data", "device", "steps")
        if getattr(given, name)
    }
    return dataclasses.replace(SIZES[given.size], **chosen)


@cache
def corpus(spec: str = "stdlib") -> Dataset:
    """Return a corpus, read once."""
    return load_dataset(spec, seed=SPLIT_SEED)
