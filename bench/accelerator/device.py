"""The device that jobs get, and what this machine says of it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import torch

from atoll.devices.choose import choose
from atoll.devices.facts import facts
from atoll.node.machine.probe import Gpus, measure_compute


def measure(*, quick: bool) -> dict[str, Any]:
    """Return torch's facts, the driver's figures, the agent's trial and the lines of the doctor."""
    doctor = subprocess.run(
        [sys.executable, "-m", "atoll.cli", "doctor"], capture_output=True, text=True, timeout=60.0
    )
    lines = [line.strip() for line in doctor.stdout.splitlines()]
    return {
        "torch": torch.__version__,
        "facts": dataclasses.asdict(facts(choose())),
        "driver": {"name": Gpus().name, "memory_bytes": Gpus().memory_bytes, **Gpus().figures()},
        "trial": dataclasses.asdict(measure_compute()),
        "doctor": [line for line in lines if "device" in line or "matmul" in line],
    }
