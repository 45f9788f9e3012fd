"""Hardware and software of a machine, measured without loading torch into the agent."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

import atoll
from atoll import system
from atoll.node.imports import load
from atoll.node.machine import nvml
from atoll.node.machine.accelerators import computes_on, why_idle
from atoll.wire.messages import NodeInfo

log = logging.getLogger(__name__)


class Gpus:
    """NVIDIA's accelerators according to its driver; none without it."""

    def __init__(self, library: nvml.Library | None = None) -> None:
        """Ask a library; None: that of the driver, if there is one."""
        self._library: nvml.Library | None = None
        self._numbers = range(0)
        try:
            self._library = nvml.load() if library is None else library
            if self._library is not None:
                self._numbers = range(self._library.count())
        except OSError as error:
            log.debug("accelerators cannot be queried: %s", error)

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def name(self) -> str:
        """Name of the first one, or ""."""
        with contextlib.suppress(OSError):
            return self._library.name(0) if self._library is not None and self._numbers else ""
        return ""

    @property
    def memory_bytes(self) -> int:
        """Memory of the first one; 0: not known, e.g. because it is that of the processor."""
        with contextlib.suppress(OSError):
            return self._library.memory(0)[1] if self._library is not None and self._numbers else 0
        return 0

    def figures(self) -> dict[str, float]:
        """Return `gpu_percent` (the mean of all) and `gpu_memory_used_bytes` (their sum)."""
        library = self._library if self._numbers else None
        if library is None:
            return {}
        try:
            busy = [library.busy_percent(number) for number in self._numbers]
            used = [library.memory(number)[0] for number in self._numbers]
        except OSError as error:  # e.g. the driver was updated under it
            log.warning("accelerators can no longer be queried: %s", error)
            self._numbers = range(0)
            return {}
        return {
            "gpu_percent": float(sum(busy)) / len(busy),
            "gpu_memory_used_bytes": float(sum(used)),
        }


MATMUL_TIMEOUT_S = 60.0
"""Importing torch from a cold disk alone can take half of this."""


REUSED_S = 86_400.0
"""How long a trial is reused, so that a restarted service joins at once."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Result of a short trial in another process."""

    gflops: float = 0.0
    """Billions of floating-point operations per second in fp32 matmuls; 0: not measured."""
    gpu: str = ""
    """Name of the first accelerator that torch can use."""
    gpus: int = 0
    """Accelerators that torch can use."""
    gpu_memory_bytes: int = 0
    """Memory of the first one."""
    error: str = ""


def node_info(
    home: Path,
    *,
    slots: int = 1,
    compute: Compute | None = None,
    gpus: Gpus | None = None,
    launchers: Sequence[str] = ("process",),
    wanted: str = "auto",
) -> NodeInfo:
    """Return the description of this machine for the hub; the disk is that of `home`.

    The trial's accelerators (`compute`) take precedence over NVML's (`gpus`); `wanted` is the
    device of jobs that the owner chose.
    """
    compute = compute or Compute()
    gpus = gpus or Gpus()
    idle = why_idle(compute, gpus, wanted=wanted)
    return NodeInfo(
        hostname=platform.node(),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        atoll=atoll.__version__,
        torch=torch_version(),
        cores=usable_cores(),
        memory_bytes=psutil.virtual_memory().total,
        disk_free_bytes=shutil.disk_usage(existing(home)).free,
        gpu=compute.gpu or gpus.name,
        gpus=compute.gpus or len(gpus),
        gpu_memory_bytes=compute.gpu_memory_bytes or gpus.memory_bytes,
        launchers=list(launchers),
        slots=slots,
        matmul_gflops=round(compute.gflops, 1),
        computes_on=computes_on(compute),
        idle=str(idle or ""),
    )


def default_slots(compute: Compute | None, device: str) -> int:
    """Return how many processes a machine takes at once, unless its owner says otherwise.

    One per accelerator on which they may compute, so that none is idle; else one. `device` is the
    owner's choice.
    """
    return max(1, compute.gpus) if compute is not None and ":" not in device else 1


def torch_version() -> str:
    """Return the version of torch without importing it, or ""."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def usable_cores() -> int:
    """Return the number of cores that this process may run on, e.g. in a container."""
    return len(system.usable_cpus())


def existing(path: Path) -> Path:
    """Return the path or its nearest parent that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def known_compute(folder: Path, gpus: Gpus, *, device: str = "auto") -> Compute:
    """Return what a trial of the last day found on this machine, or try now and keep that.

    Args:
        folder: Where it is kept, one for all agents of a user.
        gpus: The machine's accelerators; if they, torch or the cores change, it is tried anew.
        device: The device of jobs that the owner chose, on which it is tried.
    """
    path = folder / "compute.json"
    hardware = [platform.node(), usable_cores(), len(gpus), gpus.name]
    machine = [*hardware, sys.executable, torch_version(), device]
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # none, or damaged
        if 0 <= time.time() - path.stat().st_mtime < REUSED_S:
            kept = json.loads(path.read_bytes())
            if kept["machine"] == machine:
                return Compute(**kept["compute"])
    found = measure_compute(device=device)
    if found.error:
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("wb", dir=folder, delete=False) as file:
            kept = {"machine": machine, "compute": dataclasses.asdict(found)}
            file.write(json.dumps(kept).encode())
        os.replace(file.name, path)  # agents that start together each write a whole file
    except OSError as error:
        log.info(
            "the result of the matmul trial cannot be saved, the next start repeats it: %s", error
        )
    return found


def measure_compute(*, device: str = "auto", timeout_s: float = MATMUL_TIMEOUT_S) -> Compute:
    """Measure matmul speed and accelerator in a child process, on the device that jobs get."""
    if not torch_version():
        return Compute(error="torch is not installed")
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "atoll.node.machine.probe", device],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=True,
        )
        return Compute(**json.loads(done.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return Compute(error=f"the trial took longer than {timeout_s:.0f} s")
    except (subprocess.CalledProcessError, OSError, ValueError, IndexError) as error:
        log.warning("the matmul trial failed: %s", error)
        return Compute(error=str(error))


LEAST_PRODUCT_S = 2e-3
"""Least time of a timed product on an accelerator: a shorter one measures mostly its launch."""

LARGEST = 8192
"""Rows of the largest product: three such matrices need 0.8 GB of an accelerator's memory."""


def trial(wanted: str = "auto", *, seconds: float = 0.4, size: int = 512) -> Compute:
    """Measure fp32 matmuls in this process, where jobs compute; imports torch.

    Args:
        wanted: The device of jobs that the owner chose.
        seconds: How long to measure.
        size: Rows and columns. On an accelerator they are doubled until a product takes a while.

    Raises:
        ConfigError: the wanted device is missing.
    """
    import torch

    from atoll.devices.choose import CPU, choose, count
    from atoll.devices.facts import memory, name_of
    from atoll.devices.runtime import synchronize

    device = choose(wanted)
    left = torch.randn(size, size, device=device)
    out = left @ left
    synchronize(device)

    def product() -> float:
        began = time.perf_counter()
        torch.mm(left, left, out=out)
        synchronize(device)
        return time.perf_counter() - began

    while device.type != CPU and size < LARGEST and min(product(), product()) < LEAST_PRODUCT_S:
        size *= 2
        left = torch.randn(size, size, device=device)
        out = torch.empty_like(left)
    spent = products = 0.0
    while spent < seconds:
        spent += product()
        products += 1
    found = Compute(gflops=products * 2 * size**3 / spent / 1e9)
    if device.type == CPU:
        return found
    return dataclasses.replace(
        found, gpu=name_of(device), gpus=count(), gpu_memory_bytes=memory(device)[1]
    )


if __name__ == "__main__":
    load("torch")
    found = trial(*sys.argv[1:])
    sys.stdout.write(json.dumps(dataclasses.asdict(found)) + "\n")
