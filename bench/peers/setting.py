"""What all systems have in common: model, texts, inner and outer optimizer, length."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from atoll.data.corpora import load_corpus
from atoll.models import GPT, GPTConfig

SEED = 7
FILE, HELD_OUT = "setting.json", "held_out.npy"

TEXTS = ("stdlib", f"files:{Path(torch.__file__).parent}/include/torch/csrc/**/*.h")
"""Python and C++, both on every machine that has torch."""

Bytes = NDArray[np.uint8]
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One size of the comparison; the defaults are that of the table."""

    members: int = 4
    layers: int = 4
    width: int = 256
    context: int = 128
    batch: int = 2
    lr: float = 1e-3
    steps: int = 150
    every: int = 50
    """Steps between two rounds (H); the last step ends one."""
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    """Of the outer Nesterov step; as in the DiLoCo paper."""
    text_bytes: tuple[int, int] = (1_500_000, 1_000_000)
    """Trained on, of either text. One after the other, they are cut into a piece per member: of
    four the first two read Python, the last C++, and the third both."""
    held_out_windows: int = 256

    def write(self, folder: Path) -> None:
        """Put this and every member's text into a folder."""
        (folder / FILE).write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")
        texts = [np.frombuffer(load_corpus(name).text, dtype=np.uint8) for name in TEXTS]
        trained = np.concatenate(
            [text[:size] for text, size in zip(texts, self.text_bytes, strict=True)]
        )
        for slot, piece in enumerate(np.array_split(trained, self.members)):
            np.save(folder / f"text{slot}.npy", piece)
        np.save(folder / HELD_OUT, self._held_out(texts))

    def _held_out(self, texts: list[Bytes]) -> Bytes:
        """Return windows `(windows, context + 1)` of what is not trained on, as mixed as the rest.

        They are spread over all of it.
        """
        windows = []
        for text, size in zip(texts, self.text_bytes, strict=True):
            count = self.held_out_windows * size // sum(self.text_bytes)
            starts = np.linspace(size, len(text) - self.context - 1, max(1, count)).astype(int)
            windows += [text[start : start + self.context + 1] for start in starts]
        return np.stack(windows)

    def make_model(self) -> GPT:
        """Return the model, the same on every member."""
        torch.manual_seed(SEED)
        size = GPTConfig(layers=self.layers, width=self.width, context=self.context)
        return GPT(size)


def read_setting(folder: Path) -> Setting:
    """Return what `Setting.write` has put into a folder."""
    fields: dict[str, Any] = json.loads((folder / FILE).read_text(encoding="utf-8"))
    return Setting(**fields | {"text_bytes": tuple(fields["text_bytes"])})


def as_batch(windows: Bytes) -> Batch:
    """Return inputs and targets, int64 `(windows, context)` each."""
    tokens = torch.from_numpy(windows.astype(np.int64))
    return tokens[:, :-1], tokens[:, 1:]


class Batches:
    """A member's batches: windows at random places of its text."""

    def __init__(self, setting: Setting, folder: Path, slot: int) -> None:
        """Read the text of a slot."""
        self._text: Bytes = np.load(folder / f"text{slot}.npy")
        self._random = np.random.default_rng(SEED + slot)
        self._shape = setting.batch, setting.context + 1

    def next(self) -> Batch:
        """Return the next batch."""
        batch, length = self._shape
        starts = self._random.integers(0, len(self._text) - length, batch)
        return as_batch(np.stack([self._text[start : start + length] for start in starts]))


def flat(model: nn.Module) -> NDArray[np.float32]:
    """Return all parameters as one vector."""
    parameters = [parameter.detach().flatten() for parameter in model.parameters()]
    return np.asarray(torch.cat(parameters).numpy(), dtype=np.float32)


@torch.no_grad()
def held_out_loss(setting: Setting, folder: Path, parameters: NDArray[np.float32]) -> float:
    """Return the loss of a vector of parameters on the held-out text, in nats per byte."""
    model = setting.make_model()
    nn.utils.vector_to_parameters(torch.from_numpy(parameters), model.parameters())
    windows: Bytes = np.load(folder / HELD_OUT)
    parts = [windows[start : start + 16] for start in range(0, len(windows), 16)]
    total = sum(float(model.loss(*as_batch(part))) * len(part) for part in parts)
    return total / len(windows)
