"""What a heartbeat reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.net.transport import LinkCounters
from atoll.node.agent.reports import HeartbeatStats
from atoll.node.machine import nvml
from atoll.node.machine.probe import Gpus
from tests.node.availability.test_sensors import supply

ALWAYS = {"cpu_percent", "memory_percent", "memory_free_bytes", "load", "disk_free_bytes"}


def test_figures_are_numbers_and_what_is_not_there_is_left_out(tmp_path: Path) -> None:
    figures = HeartbeatStats(tmp_path / "not" / "there", root=tmp_path)()
    assert set(figures) >= ALWAYS
    assert not set(figures) & {"battery_percent", "latency_ms", "up_bps", "reconnects"}
    assert all(isinstance(value, float) for value in figures.values())
    assert figures["disk_free_bytes"] > 0


def test_battery_link_and_speed_are_told_when_they_are_known(tmp_path: Path) -> None:
    supply(tmp_path, "BAT0", type="Battery", status="Discharging", capacity="63")
    figures = HeartbeatStats(tmp_path, root=tmp_path)
    figures.counters = LinkCounters(reconnects=2)
    figures.counters.measured(round_trip_s=0.02)
    figures.up_bps, figures.down_bps = 5e6, 9e6
    metrics = figures()
    assert (metrics["battery_percent"], metrics["on_battery"]) == (63.0, 1.0)
    assert (metrics["latency_ms"], metrics["reconnects"]) == (20.0, 2.0)
    assert (metrics["up_bps"], metrics["down_bps"]) == (5e6, 9e6)


class Library:
    """The driver's library of a machine with two accelerators."""

    broken = False

    def count(self) -> int:
        return 2

    def name(self, number: int) -> str:
        return f"card {number}"

    def busy_percent(self, number: int) -> int:
        if self.broken:
            raise OSError("the driver is gone")
        return 20 + 40 * number

    def memory(self, number: int) -> tuple[int, int]:
        return 10**9, 8 * 10**9


def test_failing_accelerator_library_is_harmless() -> None:
    library = Library()
    gpus = Gpus(library)
    assert (len(gpus), gpus.name, gpus.memory_bytes) == (2, "card 0", 8 * 10**9)
    assert gpus.figures() == {"gpu_percent": 40.0, "gpu_memory_used_bytes": 2e9}
    library.broken = True
    assert gpus.figures() == {}
    assert len(gpus) == 0


def test_accelerator_may_have_no_name_or_memory_of_its_own() -> None:
    class Refusing(Library):
        def name(self, number: int) -> str:
            raise OSError("not supported")

        def memory(self, number: int) -> tuple[int, int]:
            raise OSError("not supported")

    gpus = Gpus(Refusing())
    assert (len(gpus), gpus.name, gpus.memory_bytes) == (2, "", 0)


@pytest.mark.parametrize("library", ["libno-such-driver.so.1", "libc.so.6"])
def test_a_machine_without_the_library_has_no_accelerators(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "LIBRARIES", (library,))
    gpus = Gpus()
    assert (len(gpus), gpus.name, gpus.memory_bytes, gpus.figures()) == (0, "", 0, {})
