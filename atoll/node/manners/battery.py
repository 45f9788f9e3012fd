"""Whether the machine runs on its battery, and how full that is."""

from __future__ import annotations

from pathlib import Path

import psutil

from atoll.node.manners.reading import Reading

SUPPLIES = Path("sys/class/power_supply")


class Battery:
    """Reads the kernel's power supplies; psutil where there are none of its kind."""

    def __init__(self, root: Path = Path("/")) -> None:
        """Look below `root`, e.g. a copy of /sys made for a test."""
        self._root = root

    def read(self) -> Reading:
        """Return whether it runs on battery, and the charge in percent; nothing without one."""
        folder = self._root / SUPPLIES
        if folder.is_dir():
            return _from_files(folder)
        return _from_psutil() if self._root == Path("/") else Reading()


def _from_files(folder: Path) -> Reading:
    """Return what the files of the power supplies say."""
    mains, draining, levels = False, False, []
    for supply in sorted(folder.iterdir()):
        kind = _word(supply / "type")
        if kind == "battery" and _word(supply / "scope") != "device":  # not that of a mouse
            level = _number(supply / "capacity")
            if level is not None:
                levels.append(level)
                draining |= _word(supply / "status") == "discharging"
        elif kind in ("mains", "usb") and _word(supply / "online") == "1":
            mains = True
    if not levels:
        return Reading()
    percent = sum(levels) / len(levels)
    return Reading(on_battery=draining and not mains, battery_percent=percent)


def _from_psutil() -> Reading:
    """Return what the system tells psutil (macOS, Windows)."""
    sensor = getattr(psutil, "sensors_battery", None)  # some systems have none
    try:
        found = sensor() if sensor is not None else None
    except (OSError, RuntimeError):
        found = None
    if found is None:
        return Reading()
    return Reading(on_battery=found.power_plugged is False, battery_percent=float(found.percent))


def _word(path: Path) -> str:
    """Return the text of a small file, lower case; empty when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip().lower()
    except OSError:
        return ""


def _number(path: Path) -> float | None:
    """Return the number in a small file."""
    try:
        return float(_word(path))
    except ValueError:
        return None
