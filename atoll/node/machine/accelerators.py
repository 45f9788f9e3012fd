"""Which device jobs compute on, and why an accelerator of this machine is idle; without torch."""

from __future__ import annotations

import importlib.util
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.node.machine.probe import Compute, Gpus

GB = 10**9
INDEX = "https://download.pytorch.org/whl"


@dataclass(frozen=True, slots=True)
class Vendor:
    """A maker of accelerators, and how torch reaches them."""

    name: str
    build: str
    """Name in torch's description of its build."""
    install: str
    """How to get such a torch."""
    driver: str
    """What to install, or what is required, if there is no working driver."""
    sign: str = ""
    """A file that exists while the driver is loaded."""


NVIDIA = Vendor(
    "NVIDIA", "cuda", f"pip install --force-reinstall torch --index-url {INDEX}/cu126",
    "install NVIDIA's driver: nvidia-smi must list the accelerator", "proc/driver/nvidia/version",
)  # fmt: skip
AMD = Vendor(
    "AMD", "hip", f"pip install --force-reinstall torch --index-url {INDEX}/rocm6.4",
    "install AMD's driver (ROCm): rocminfo must list the accelerator", "dev/kfd",
)  # fmt: skip
INTEL = Vendor(
    "Intel", "xpu", f"pip install --force-reinstall torch --index-url {INDEX}/xpu",
    "install Intel's compute runtime: clinfo must list the accelerator", "dev/dri",
)  # fmt: skip
APPLE = Vendor(
    "Apple", "mps", "use a Python for arm64 (not one under Rosetta)", "macOS 13 or newer"
)

PCI_VENDORS = {"0x10de": NVIDIA, "0x1002": AMD, "0x8086": INTEL}
DISPLAY = "0x03"
"""First digits of the PCI class of graphics and 3D controllers."""

DISCRETE_BYTES = 4 * GB
"""Dedicated memory from which AMD graphics count as discrete, not integrated."""

INTEL_DISCRETE = ("0x56", "0x0bd", "0xe2")
"""First digits of Intel's products that torch supports; integrated graphics are not meant."""


@dataclass(frozen=True, slots=True)
class Idle:
    """An accelerator that no job uses."""

    what: str
    """Its name, or that of its maker."""
    reason: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.what} is idle: {self.reason}" + f"; {self.remedy}" * bool(self.remedy)


def computes_on(compute: Compute) -> str:
    """Return the device of jobs for people, e.g. `NVIDIA H100 (80 GB)`; empty: not tried."""
    if compute.gpu:
        several = f"{compute.gpus} x " if compute.gpus > 1 else ""
        memory = f" ({compute.gpu_memory_bytes / GB:.0f} GB)" if compute.gpu_memory_bytes else ""
        return f"{several}{compute.gpu}{memory}"
    return "processor" if compute.gflops else ""


def why_idle(
    compute: Compute, gpus: Gpus, *, wanted: str = "auto", root: Path = Path("/")
) -> Idle | None:
    """Return why an accelerator of this machine is not used; None if all are, or there is none.

    Args:
        compute: What the trial found, on the device that jobs get.
        gpus: What NVIDIA's driver finds.
        wanted: The device of jobs that the owner chose.
        root: The file system's root.
    """
    vendor = NVIDIA if len(gpus) else _vendor(root)
    if compute.gpu or vendor is None:
        return None
    what = gpus.name or f"an accelerator of {vendor.name}"
    if wanted == "cpu":
        return Idle(what, 'its owner keeps it (device = "cpu")')
    build = torch_build()
    if not build:
        return Idle(what, "torch is not installed", "pip install 'atoll[train]'")
    if vendor.build not in build:
        version = build["version"]
        return Idle(what, f"torch {version} is built without support for it", vendor.install)
    if not (len(gpus) or not vendor.sign or (root / vendor.sign).exists()):
        return Idle(what, "its driver is missing", vendor.driver)
    if compute.error or compute.gflops:
        reason = compute.error or f"torch {build['version']} finds no device that it can use"
        return Idle(what, reason, vendor.driver)
    return None  # not tried


def torch_build() -> dict[str, str]:
    """Return the version of torch and what it is built for, e.g. cuda; empty without torch.

    Read from its files: loading it takes seconds.
    """
    found = importlib.util.find_spec("torch")
    if found is None or not found.origin:
        return {}
    try:
        text = (Path(found.origin).parent / "version.py").read_text("utf-8")
    except OSError:
        return {}
    build = {
        name.removeprefix("__").removesuffix("__"): value
        for name, value in re.findall(r"(?m)^(\w+)\b[^=\n]*= '([^']+)'", text)
    }
    if _apple():
        build["mps"] = "yes"
    return build if "version" in build else {}


def _vram_bytes(device: Path) -> int:
    """Return the dedicated memory of an AMD device, from its driver; 0: unknown."""
    try:
        return int((device / "mem_info_vram_total").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0


def _apple() -> bool:
    return platform.system() == "Darwin" and platform.machine() == "arm64"


def _vendor(root: Path) -> Vendor | None:
    """Return the maker of the first accelerator on the machine's bus."""
    if _apple():
        return APPLE
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        try:
            kind, maker, product = (
                (device / name).read_text(encoding="utf-8").strip()
                for name in ("class", "vendor", "device")
            )
        except OSError:
            continue
        vendor = PCI_VENDORS.get(maker) if kind.startswith(DISPLAY) else None
        if vendor is INTEL and not product.startswith(INTEL_DISCRETE):
            continue
        if vendor is AMD and _vram_bytes(device) < DISCRETE_BYTES:
            continue
        if vendor is not None:
            return vendor
    return None
