"""Sensors of a machine: battery, activity of the owner, lid, metered network.

They read system files or run small programs, the latter at most every `SLOW_S` seconds.
"""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil

from atoll.clock import Clock, RealClock
from atoll.node.availability.policy import OwnerPolicy
from atoll.node.availability.reading import Reading, Sensor, combine_sensors

SUPPLIES = Path("sys/class/power_supply")


class Battery:
    """Reads the kernel's power supplies, or psutil without them."""

    def __init__(self, root: Path = Path("/")) -> None:
        """Read below `root`, e.g. a copy of /sys made for a test."""
        self._root = root

    def read(self) -> Reading:
        """Return whether it runs on battery, and the charge in percent; empty without a battery."""
        folder = self._root / SUPPLIES
        if folder.is_dir():
            return _from_files(folder)
        return _from_psutil() if self._root == Path("/") else Reading()


def _from_files(folder: Path) -> Reading:
    mains, draining, levels = False, False, []
    for supply in sorted(folder.iterdir()):
        kind = _word(supply / "type")
        if kind == "battery" and _word(supply / "scope") != "device":  # e.g. of a mouse
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
    """Return what psutil reports (macOS, Windows)."""
    sensor = getattr(psutil, "sensors_battery", None)  # some systems have none
    try:
        found = sensor() if sensor is not None else None
    except (OSError, RuntimeError):
        found = None
    if found is None:
        return Reading()
    return Reading(on_battery=found.power_plugged is False, battery_percent=float(found.percent))


def _word(path: Path) -> str:
    """Return the text of a small file in lower case; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip().lower()
    except OSError:
        return ""


def _number(path: Path) -> float | None:
    try:
        return float(_word(path))
    except ValueError:
        return None


log = logging.getLogger(__name__)

TIMEOUT_S = 2.0


class Commands:
    """Runs programs found in a search path; a missing one returns nothing."""

    def __init__(self, path: str | None = None) -> None:
        """Search `path` (folders as in PATH); None: the system's."""
        self._path = path

    def find(self, name: str) -> str | None:
        """Return the path of a program, or None."""
        return shutil.which(name, path=self._path)

    def ask(self, name: str, *arguments: str) -> str:
        """Return a program's output; empty if it is missing, fails or takes too long."""
        program = self.find(name)
        if program is None:
            return ""
        try:
            done = subprocess.run(
                [program, *arguments],
                capture_output=True,
                text=True,
                errors="replace",
                stdin=subprocess.DEVNULL,
                timeout=TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            log.debug("%s did not answer: %s", name, error)
            return ""
        return done.stdout if done.returncode == 0 else ""

    def logind(self, *names: str) -> list[str]:
        """Return properties of the login manager as words, e.g. `true` or `1700000000000000`."""
        answer = self.ask(
            "busctl", "--system", "get-property", "org.freedesktop.login1",
            "/org/freedesktop/login1", "org.freedesktop.login1.Manager", *names,
        )  # fmt: skip
        words = [line.split()[-1] for line in answer.splitlines() if line.split()]
        return words if len(words) == len(names) else []


_HID_IDLE = re.compile(r'"HIDIdleTime"\s*=\s*(\d+)')

DEVICES = ("dev/pts/[0-9]*", "dev/tty[0-9]*", "dev/input/event*", "dev/input/mouse*")
"""Files with an access time that is the time of the last input."""


class Activity:
    """Combines all sources of the time of the last input; the latest counts."""

    def __init__(
        self,
        *,
        root: Path = Path("/"),
        commands: Commands | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._root = root
        self._commands = commands or Commands()
        self._clock = clock or RealClock()

    def read(self) -> Reading:
        """Return the seconds since the last input."""
        idle = [seconds for seconds in self._sources() if seconds is not None]
        return Reading(idle_s=max(0.0, min(idle))) if idle else Reading()

    def _sources(self) -> Iterator[float | None]:
        screen = self._from_screen()
        yield screen
        if screen is None:  # the desktop's own report is coarser
            yield self._from_login_manager()
        yield self._from_mac()
        yield self._from_devices()

    def _from_screen(self) -> float | None:
        """Return the X server's answer, which is in milliseconds."""
        answer = self._commands.ask("xprintidle").strip()
        return int(answer) / 1000 if answer.isdigit() else None

    def _from_login_manager(self) -> float | None:
        """Return the login manager's answer; some desktops never inform it."""
        words = self._commands.logind("IdleHint", "IdleSinceHint")
        if len(words) != 2 or not words[1].isdigit() or int(words[1]) == 0:
            return None
        if words[0] != "true":
            return 0.0
        return self._clock.wall() - int(words[1]) / 1e6

    def _from_mac(self) -> float | None:
        """Return the answer of macOS, which is in nanoseconds."""
        found = _HID_IDLE.search(self._commands.ask("ioreg", "-c", "IOHIDSystem", "-d", "4"))
        return int(found[1]) / 1e9 if found else None

    def _from_devices(self) -> float | None:
        """Return the seconds since terminals and input devices were last read."""
        touched = []
        for pattern in DEVICES:
            for path in self._root.glob(pattern):
                try:
                    touched.append(path.stat().st_atime)
                except OSError:
                    continue
        return self._clock.wall() - max(touched) if touched else None


class Lid:
    """Reads the kernel's button, or asks the login manager."""

    def __init__(self, *, root: Path = Path("/"), commands: Commands | None = None) -> None:
        self._root = root
        self._commands = commands or Commands()

    def read(self) -> Reading:
        """Return whether the lid is closed; always open on a docked machine."""
        closed = self._from_files()
        if closed is None:
            words = self._commands.logind("LidClosed")
            closed = words[0] == "true" if words else None
        if closed and self._commands.logind("Docked") == ["true"]:
            closed = False
        return Reading(lid_closed=closed)

    def _from_files(self) -> bool | None:
        states = []
        for path in sorted(self._root.glob("proc/acpi/button/lid/*/state")):
            try:
                states.append(path.read_text(encoding="utf-8", errors="replace"))
            except OSError:
                continue
        return any("closed" in state for state in states) if states else None


_YES, _NO = ("1", "3"), ("2", "4")
"""Values of NetworkManager's property: yes and guessed yes, no and guessed no."""


class Metered:
    """Asks NetworkManager; unknown on other systems."""

    def __init__(self, commands: Commands | None = None) -> None:
        self._commands = commands or Commands()

    def read(self) -> Reading:
        """Return whether the network is metered."""
        answer = self._commands.ask(
            "busctl", "--system", "get-property", "org.freedesktop.NetworkManager",
            "/org/freedesktop/NetworkManager", "org.freedesktop.NetworkManager", "Metered",
        ).split()  # fmt: skip
        if answer and answer[-1] in (*_YES, *_NO):
            return Reading(metered=answer[-1] in _YES)
        shown = self._commands.ask("nmcli", "-t", "-f", "GENERAL.METERED", "device", "show")
        said = [line.partition(":")[2].strip() for line in shown.splitlines() if ":" in line]
        if any(word.startswith("yes") for word in said):
            return Reading(metered=True)
        return Reading(metered=False) if any(word.startswith("no") for word in said) else Reading()


SLOW_S = 10.0
"""Interval between readings of a sensor that starts a program."""

ABSENT_S = 300.0
"""The same for a sensor without a value: this machine has no lid, or no such program."""


class Sensors:
    """Reads the sensors that a policy needs."""

    def __init__(
        self,
        *,
        root: Path = Path("/"),
        commands: Commands | None = None,
        clock: Clock | None = None,
    ) -> None:
        commands = commands or Commands()
        self._clock = clock or RealClock()
        self._battery = Battery(root)
        self._lid = Lid(root=root, commands=commands)
        self._metered = Metered(commands)
        self._activity = Activity(root=root, commands=commands, clock=self._clock)
        self._kept: dict[Sensor, tuple[float, Reading]] = {}

    def read(self, policy: OwnerPolicy) -> Reading:
        """Return the values that the policy needs; may take seconds, so call it in a thread."""
        readings = [self._battery.read()] if policy.pause_on_battery else []
        if policy.pause_on_lid_close:
            readings.append(self._recent(self._lid))
        if policy.pause_on_metered:
            readings.append(self._recent(self._metered))
        if policy.pause_when_active:
            readings.append(self._recent(self._activity))
        return combine_sensors(readings)

    def read_all(self) -> Reading:
        """Return all values."""
        sensors: list[Sensor] = [self._battery, self._lid, self._metered, self._activity]
        return combine_sensors(sensor.read() for sensor in sensors)

    def _recent(self, sensor: Sensor) -> Reading:
        now = self._clock.monotonic()
        until, reading = self._kept.get(sensor, (now, Reading()))
        if now >= until:
            reading = sensor.read()
            self._kept[sensor] = now + (ABSENT_S if reading == Reading() else SLOW_S), reading
        return reading
