"""An ONNX file: token ids to logits, any batch and length, without a cache of keys and values."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atoll.errors import ConfigError
from atoll.export.opened import Opened

NEEDED = ("onnx", "onnxscript")


class _Logits(nn.Module):
    """A model as a function of ids alone."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.theirs = theirs

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return logits ``(batch, length, vocab)`` for int64 ids ``(batch, length)``."""
        found: Tensor = self.theirs(input_ids=input_ids, use_cache=False).logits
        return found


def write_onnx(opened: Opened, file: Path) -> None:
    """Write the whole model, adapters merged: input `input_ids`, output `logits`.

    Weights of more than 2 GB are in a file beside it, `FILE.data`.

    Raises:
        ConfigError: a library is missing, or torch cannot express the model.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            "writing ONNX needs libraries that are not installed", given=f"no {missing[0]}",
            expected=" and ".join(NEEDED), remedy="pip install 'atoll[onnx]'",
        )  # fmt: skip
    model = _Logits(opened.whole()).eval()
    example = torch.zeros((2, 8), dtype=torch.int64)
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    noisy = logging.getLogger("torch.onnx")
    before = noisy.level
    noisy.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                model, (example,), str(file), input_names=["input_ids"], output_names=["logits"],
                dynamic_shapes={"input_ids": sizes}, dynamo=True, external_data=_large(model),
                verbose=False,
            )  # fmt: skip
    except torch.onnx.errors.OnnxExporterError as error:
        raise ConfigError(
            "torch cannot write this model as ONNX",
            given=" ".join(str(error).split())[:300], expected="a model that torch.export takes",
            remedy="export a folder and use the tools of its library",
        ) from error  # fmt: skip
    finally:
        noisy.setLevel(before)


def _large(model: nn.Module) -> bool:
    """Return whether the weights exceed what one protobuf file may hold."""
    return sum(p.numel() * p.element_size() for p in model.parameters()) > 2_000_000_000
