"""The device of jobs, and why an accelerator is idle, with the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.node.machine import accelerators
from atoll.node.machine.accelerators import computes_on, torch_build, why_idle
from atoll.node.machine.probe import Compute, Gpus, torch_version

CPU_BUILD = {"version": "2.13.0+cpu"}
CUDA_BUILD = {"version": "2.13.0+cu126", "cuda": "12.6"}
ON_CPU = Compute(gflops=50.0)


class Found(Gpus):
    """What NVIDIA's driver says of one accelerator."""

    name = "GeForce RTX 3060"

    def __init__(self) -> None:
        pass

    def __len__(self) -> int:
        return 1


class Nothing(Found):
    name = ""

    def __len__(self) -> int:
        return 0


def bus(root: Path, vendor: str, device: str = "0x2504", kind: str = "0x030000") -> Path:
    place = root / "sys/bus/pci/devices/0000:01:00.0"
    place.mkdir(parents=True)
    for name, text in (("vendor", vendor), ("device", device), ("class", kind)):
        (place / name).write_text(text + "\n")
    return place


@pytest.fixture(autouse=True)
def not_apple(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "_apple", lambda: False)


def built(monkeypatch: pytest.MonkeyPatch, build: dict[str, str]) -> None:
    monkeypatch.setattr(accelerators, "torch_build", lambda: build)


def test_torch_for_the_processor_beside_a_driver_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    built(monkeypatch, CPU_BUILD)
    idle = why_idle(ON_CPU, Found(), root=tmp_path)
    assert idle is not None
    assert idle.what == "GeForce RTX 3060"
    assert idle.reason == "torch 2.13.0+cpu is built without support for it"
    assert "pip install --force-reinstall torch --index-url" in idle.remedy
    assert str(idle).startswith("GeForce RTX 3060 is idle: torch 2.13.0+cpu")


def test_a_missing_driver_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built(monkeypatch, CUDA_BUILD)
    bus(tmp_path, "0x10de")
    idle = why_idle(ON_CPU, Nothing(), root=tmp_path)
    assert idle is not None
    assert (idle.what, idle.reason) == ("an accelerator of NVIDIA", "its driver is missing")
    assert "nvidia-smi" in idle.remedy


def test_an_owner_keeps_it_and_a_missing_torch_are_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    built(monkeypatch, {})
    kept = why_idle(ON_CPU, Found(), wanted="cpu", root=tmp_path)
    assert kept is not None
    assert "its owner keeps it" in kept.reason
    missing = why_idle(Compute(error="torch is not installed"), Found(), root=tmp_path)
    assert missing is not None
    assert missing.remedy == "pip install 'atoll[train]'"


def test_what_torch_cannot_use_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built(monkeypatch, CUDA_BUILD)
    idle = why_idle(ON_CPU, Found(), root=tmp_path)
    assert idle is not None
    assert "torch 2.13.0+cu126 finds no device" in idle.reason
    assert why_idle(Compute(), Found(), root=tmp_path) is None  # not tried


@pytest.mark.parametrize(
    ("vendor", "device", "kind", "vram", "expected"),
    [
        ("0x10de", "0x2504", "0x030200", 0, "NVIDIA"),
        ("0x1002", "0x73bf", "0x030000", 16 << 30, "AMD"),
        ("0x1002", "0x1638", "0x030000", 512 << 20, ""),  # integrated
        ("0x8086", "0x56a0", "0x030000", 0, "Intel"),
        ("0x8086", "0x46a6", "0x030000", 0, ""),  # integrated
        ("0x10de", "0x10fa", "0x040300", 0, ""),  # its sound
    ],
)
def test_makers_are_found_on_the_bus(
    vendor: str, device: str, kind: str, vram: int, expected: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    built(monkeypatch, CPU_BUILD)
    (bus(tmp_path, vendor, device, kind) / "mem_info_vram_total").write_text(str(vram))
    idle = why_idle(ON_CPU, Nothing(), root=tmp_path)
    assert (idle.what if idle else "") == (f"an accelerator of {expected}" if expected else "")


def test_nothing_is_idle_where_nothing_is(tmp_path: Path) -> None:
    assert why_idle(ON_CPU, Nothing(), root=tmp_path) is None
    assert why_idle(Compute(gflops=1.0, gpu="H100", gpus=1), Found(), root=tmp_path) is None


def test_the_device_of_jobs_has_a_name_and_memory() -> None:
    found = Compute(gflops=9e4, gpu="NVIDIA H100", gpus=2, gpu_memory_bytes=80 * 10**9)
    assert computes_on(found) == "2 x NVIDIA H100 (80 GB)"
    assert computes_on(ON_CPU) == "processor"
    assert computes_on(Compute()) == ""


def test_the_build_of_torch_is_read_from_its_files() -> None:
    assert torch_build()["version"] == torch_version()
