"""Copies between main memory and the device: batches, a round's, and a snapshot beside training."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from atoll.devices.choose import choose
from atoll.devices.runtime import synchronize
from atoll.devices.transfer import Ahead
from atoll.models import GPT, GPTConfig
from atoll.strategies.inner.precision import dtype_of, precision_on
from atoll.strategies.vectors.flat import Flat
from bench.accelerator.training import SIZES

IMAGES = (64, 3, 224, 224)
"""A batch of 38.5 MB, large for the step that it is for: the copy shows."""
TINY_IMAGES = (2, 3, 32, 32)
DRAWN = 8
"""Different batches in main memory."""


def measure(*, quick: bool) -> dict[str, Any]:
    """Return the figures of all copies."""
    device = choose()
    real = device.type != "cpu"
    model = GPT(SIZES["151 M" if real else "0.1 M"][0]).to(device)
    return {
        "batches": batches(device, IMAGES if real else TINY_IMAGES, turns=3 if quick else 7),
        "round": round_copies(model, device, turns=3 if quick else 7),
        "beside": beside(model, device, turns=3 if quick else 7),
    }


def batches(device: torch.device, shape: tuple[int, ...], *, turns: int) -> dict[str, Any]:
    """Return the time of a step with its batch on the device before, copied ahead, and in it."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 64, 7, stride=2, padding=3), nn.ReLU(),
        *(part for _ in range(6) for part in (nn.Conv2d(64, 64, 3, padding=1), nn.ReLU())),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    lower = dtype_of(precision_on("auto", device))
    drawn = [torch.randn(shape) for _ in range(DRAWN)]

    def step(images: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=lower, enabled=lower is not None):
            loss = model(images).square().mean()
        loss.backward()
        optimizer.step()

    there, ahead = drawn[0].to(device), Ahead(device)

    def before(steps: int) -> None:
        for _ in range(steps):
            step(there)

    def beside(steps: int) -> None:
        with ThreadPoolExecutor(1) as thread:
            copying = thread.submit(ahead.start, drawn[0])
            for number in range(steps):
                copying.result()
                batch = ahead.take()
                copying = thread.submit(ahead.start, drawn[(number + 1) % DRAWN])
                step(batch)
            copying.result()
            ahead.take()

    def within(steps: int) -> None:
        for number in range(steps):
            step(drawn[number % DRAWN].to(device))

    steps = 10 if device.type != "cpu" else 3
    found = turns_of({"before": before, "ahead": beside, "within": within}, device, steps, turns)
    return {"batch_bytes": drawn[0].nbytes, **found}


def turns_of(
    ways: dict[str, Callable[[int], None]], device: torch.device, steps: int, turns: int
) -> dict[str, float]:
    """Return the median milliseconds of a step by way; the ways take turns."""
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns + 1):
        for name, way in ways.items():
            synchronize(device)
            began = time.perf_counter()
            way(steps)
            synchronize(device)
            if turn:  # the first one warms up
                spent[name].append((time.perf_counter() - began) / steps)
    return {f"{name}_ms": round(1e3 * statistics.median(each), 3) for name, each in spent.items()}


def round_copies(model: GPT, device: torch.device, *, turns: int) -> dict[str, Any]:
    """Return the time in which a round reads and writes a model, and in which the driver does."""
    torch.set_num_threads(1)  # as workers have
    flat = Flat(list(model.parameters()))
    vector = flat.new().normal_(std=0.02)
    views = flat.views(vector)

    def read(_: int) -> None:
        flat.read(vector)

    @torch.no_grad()
    def read_by_driver(_: int) -> None:
        for view, tensor in zip(views, flat.tensors, strict=True):
            view.copy_(tensor)

    @torch.no_grad()
    def write_by_driver(_: int) -> None:
        for view, tensor in zip(views, flat.tensors, strict=True):
            tensor.copy_(view)

    ways: dict[str, Callable[[int], None]] = {
        "write": lambda _: flat.write(vector), "write_by_driver": write_by_driver,
        "read": read, "read_by_driver": read_by_driver,
    }  # fmt: skip
    found = turns_of(ways, device, 1, turns)
    rates = {
        name.replace("_ms", "_gb_per_s"): round(vector.nbytes / value / 1e6, 2)
        for name, value in found.items()
    }
    return {"model_bytes": vector.nbytes, **found, **rates}


def beside(model: GPT, device: torch.device, *, turns: int) -> dict[str, Any]:
    """Return the time of a training step alone, and while a thread copies a snapshot away."""
    config: GPTConfig = model.config
    rows = 8 if device.type != "cpu" else 2
    tokens = torch.randint(0, 256, (rows, config.context + 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    lower = dtype_of(precision_on("auto", device))
    flat = Flat(list(model.parameters()))
    copied: list[float] = []

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=lower, enabled=lower is not None):
            loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        loss.item()

    def alone(steps: int) -> None:
        for _ in range(steps):
            step()

    def with_copies(steps: int) -> None:
        ended = threading.Event()

        def copy() -> None:
            while not ended.is_set():
                began = time.perf_counter()
                flat.snapshot()()
                copied.append(time.perf_counter() - began)

        thread = threading.Thread(target=copy, name="round")
        thread.start()
        alone(steps)
        ended.set()
        thread.join()

    steps = 30 if device.type != "cpu" else 3

    def snapshot(_: int) -> None:
        flat.snapshot()()

    found = turns_of({"alone": alone, "copying": with_copies}, device, steps, turns)
    found |= turns_of({"snapshot_alone": snapshot}, device, 1, turns)
    return {**found, "snapshot_ms": round(1e3 * statistics.median(copied), 3),
            "snapshots": len(copied)}  # fmt: skip
