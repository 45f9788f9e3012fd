"""How well a trained model predicts examples or texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from atoll.data.tuning.dataset import load_examples
from atoll.data.tuning.options import ExampleOptions
from atoll.data.tuning.packing import IGNORED, Rows
from atoll.errors import ConfigError
from atoll.export.opened import Opened


@dataclass(frozen=True, slots=True)
class Measured:
    """Loss of a model on some data.

    Attributes:
        loss: Mean cross-entropy in nats per counted token.
        tokens: Tokens that count: those of answers, or all of them.
        examples: Examples read.
    """

    loss: float
    tokens: int
    examples: int

    @property
    def perplexity(self) -> float:
        """`exp(loss)`."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def measure(
    opened: Opened,
    options: ExampleOptions,
    *,
    batch: int,
    device: torch.device,
    progress: Callable[[int], None] = lambda rows: None,
) -> Measured:
    """Return the loss on all examples of some files, each read by itself.

    Args:
        opened: The model.
        options: Which files, and how they are rendered; nothing is left out of them.
        batch: Rows computed at once.
        device: Where the model computes.
        progress: Called with the number of rows done.

    Raises:
        ConfigError: the run's tokenizer cannot be expressed by the library.
        DataError: the files are missing, or have fewer than two usable examples.
    """
    if opened.tokenizer is None:
        raise ConfigError(
            "this model cannot be measured on files", given="a vocabulary of Atoll's own",
            expected="a model of transformers, or one of bytes",
            remedy="[data] held_out in the job file: the summary has the held-out loss",
        )  # fmt: skip
    found = load_examples(options, opened.tokenizer)
    model = opened.whole().to(device)
    total, tokens, done = 0.0, 0, 0
    for rows in (found.train, found.held_out):
        for inputs, targets in _batches(rows, batch):
            loss_sum, counted = _loss(model, inputs.to(device), targets.to(device))
            total, tokens, done = total + loss_sum, tokens + counted, done + len(inputs)
            progress(done)
    return Measured(total / max(1, tokens), tokens, found.quality.kept)


def _batches(rows: Rows, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    numbers: Sequence[int] = range(len(rows))
    for start in range(0, len(rows), batch):
        yield rows.batch(np.array(numbers[start : start + batch], dtype=np.int64))


@torch.no_grad()
def _loss(model: Any, inputs: Tensor, targets: Tensor) -> tuple[float, int]:
    """Return the sum of the cross-entropy in nats, and the number of tokens it is of."""
    logits = model(input_ids=inputs[:, 0], position_ids=inputs[:, 1], use_cache=False).logits
    total = functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return float(total), int((targets != IGNORED).sum())
