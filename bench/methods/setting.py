"""What all runs have in common: model, data, inner optimizer, length."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from atoll.config import TrainTable
from atoll.data import (
    Dataset,
    HeldOutBatches,
    ImageDataset,
    ImageShards,
    Shards,
    is_images,
    load_dataset,
    load_images,
)
from atoll.models import GPT, GPTConfig, Llama, LlamaConfig, ResNet, ResNetConfig

SPLIT_SEED = 7
"""Of the held-out text, which is the same in all runs."""

Model = GPT | Llama | ResNet


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One scale at which methods are compared."""

    name: str = "gpt"
    """Of the model: `gpt`, `llama`, or `resnet`, which takes images."""
    layers: int = 5
    """Of a `resnet`: blocks of each of its three stages."""
    width: int = 128
    context: int = 64
    """Bytes of a sequence; nothing to a `resnet`."""
    batch: int = 4
    steps: int = 600
    lr: float = 1.5e-3
    held_out_tokens: int = 131_072
    """How many bytes, or images, one evaluation reads, if there are so many."""
    data: str = "stdlib"
    """Corpus, see `atoll.data.corpora`."""
    order: str = "shuffled"
    """`contiguous`: every member has one stretch of the data, of another kind than the others'."""
    speeds: tuple[float, ...] = ()
    """Relative speeds of members that push to servers, by slot; empty: all are equal."""
    device: str = "cpu"
    """What all members compute on; rounds are in main memory in any case."""

    def __post_init__(self) -> None:
        """Raise SystemExit if the model does not take the data."""
        if (self.name == "resnet") is not is_images(self.data):
            raise SystemExit(f"a {self.name} is not trained on {self.data}; images: --size images")

    @property
    def scale(self) -> str:
        """Name what a run is about, besides method, members, seed and steps."""
        sample = f"{self.batch}" if self.name == "resnet" else f"{self.batch}x{self.context}"
        return (
            f"{self.name} {self.layers}x{self.width}, {sample} of {self.data},"
            f" {self.device.partition(':')[0]}"
        )

    def table(self, changes: Mapping[str, Any]) -> TrainTable:
        """Return the inner optimizer, with what a method wants otherwise."""
        common = TrainTable(
            steps=self.steps, batch=self.batch, lr=self.lr, warmup=self.steps // 12,
            final_lr=0.02, clip=1.0,
        )  # fmt: skip
        return replace(common, **changes)

    def model(self, seed: int) -> Model:
        """Return the model of a seed in main memory; the same on every member."""
        torch.manual_seed(seed)
        data = corpus(self.data)
        if isinstance(data, ImageDataset):
            return ResNet(
                ResNetConfig(
                    channels=data.train.channels, classes=data.classes, blocks=self.layers,
                    width=self.width,
                )
            )  # fmt: skip
        if self.name == "llama":
            return Llama(
                LlamaConfig(
                    layers=self.layers, width=self.width, heads=4, kv_heads=2,
                    context=self.context,
                )
            )  # fmt: skip
        config = GPTConfig(layers=self.layers, width=self.width, heads=4, context=self.context)
        return GPT(config)

    def shards(self, seed: int, members: int) -> Shards | ImageShards:
        """Return the members' data."""
        data = corpus(self.data)
        if isinstance(data, ImageDataset):
            return ImageShards(data.train, slots=members, seed=seed, order=self.order)
        return Shards(data.train, slots=members, context=self.context, seed=seed, order=self.order)

    def held_out(self) -> HeldOutBatches:
        """Return what all runs are evaluated on."""
        data = corpus(self.data)
        if isinstance(data, ImageDataset):
            return data.batches
        return functools.partial(data.held_out.batches, context=self.context)

    @property
    def tokens_per_node(self) -> int:
        """Bytes of text, or images, that every member is trained on."""
        return self.steps * self.batch * (1 if self.name == "resnet" else self.context)


FULL = Setting()
QUICK = Setting(layers=2, width=64, steps=120, lr=8e-3, held_out_tokens=16_384)
GROUPS = replace(QUICK, steps=300)
"""In which groups of 8 and 16 members are compared."""
IMAGES = Setting(
    name="resnet", layers=1, width=16, batch=16, lr=4e-2, held_out_tokens=10_000,
    data="fashion-mnist",
)  # fmt: skip
SIZES = {
    "0.1M": QUICK, "1M": FULL, "10M": Setting(layers=6, width=384, lr=1e-3), "images": IMAGES,
}  # fmt: skip
"""Parameters, or the kind of data -> the setting of that size."""


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
    return replace(SIZES[given.size], **chosen)


@functools.cache
def corpus(spec: str = "stdlib") -> Dataset | ImageDataset:
    """Return a corpus, read once."""
    return load_images(spec) if is_images(spec) else load_dataset(spec, seed=SPLIT_SEED)
