"""The built-in trainer's loop against a bare one, for models of several sizes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from atoll.devices.choose import CPU, choose
from atoll.devices.facts import peak_bytes
from atoll.models import GPTConfig
from bench.loop import compare

SIZES = {
    "0.1 M": (GPTConfig(), 16),
    "11 M": (GPTConfig(layers=6, width=384, heads=6, context=256), 32),
    "151 M": (GPTConfig(layers=12, width=1024, heads=16, context=1024), 16),
}
"""Name -> model, and sequences of a batch."""


def measure(*, quick: bool) -> dict[str, Any]:
    """Return a row of `bench.loop` for each size, and the most memory that was in use."""
    device = choose()
    sizes = dict(SIZES)
    if device.type == CPU:
        torch.set_num_threads(1)
        sizes = {"0.1 M": SIZES["0.1 M"]}
    found: dict[str, Any] = {}
    for name, (config, batch) in sizes.items():
        with tempfile.TemporaryDirectory() as folder:
            row = compare(
                pairs=5 if quick else 15, segment_s=0.3 if quick else 0.7, folder=Path(folder),
                device=device, config=config, batch=batch,
            )  # fmt: skip
        found[name] = row | {"peak_bytes": peak_bytes(device)}
    return found
