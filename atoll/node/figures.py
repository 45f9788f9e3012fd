"""The figures of a node's heartbeat."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil

from atoll.net.counters import LinkCounters
from atoll.node.gpus import Gpus
from atoll.node.manners.battery import Battery
from atoll.node.probe import existing


class Figures:
    """Measures the machine whenever it is called; quick, and never loads torch."""

    def __init__(self, home: Path, *, gpus: Gpus | None = None, root: Path = Path("/")) -> None:
        """Measure the disk of `home`; sensors look below `root`."""
        self._home = home
        self._gpus = gpus or Gpus()
        self._battery = Battery(root)
        self.counters: LinkCounters | None = None
        """Those of the link to the hub, as soon as there is one."""
        self.up_bps = 0.0
        self.down_bps = 0.0
        """Measured speed of the way to the hub; 0: not measured yet."""

    def __call__(self) -> dict[str, float]:
        """Return shares in percent, sizes in bytes, speeds in bits per second.

        What this machine does not have, or what is not known yet, is left out.
        """
        memory = psutil.virtual_memory()
        figures = {
            "cpu_percent": psutil.cpu_percent(interval=None),
            "memory_percent": memory.percent,
            "memory_free_bytes": float(memory.available),
            "load": psutil.getloadavg()[0],
            "disk_free_bytes": float(shutil.disk_usage(existing(self._home)).free),
            **self._gpus.figures(),
        }
        power = self._battery.read()
        if power.battery_percent is not None:
            figures["battery_percent"] = power.battery_percent
            figures["on_battery"] = float(bool(power.on_battery))
        if self.counters is not None:
            figures["reconnects"] = float(self.counters.reconnects)
            if self.counters.round_trip_s:
                figures["latency_ms"] = self.counters.round_trip_s * 1000
        if self.up_bps:
            figures["up_bps"], figures["down_bps"] = self.up_bps, self.down_bps
        return figures
