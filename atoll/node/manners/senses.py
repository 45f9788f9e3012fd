"""All sensors of a machine together, each read no more often than it is worth."""

from __future__ import annotations

from pathlib import Path

from atoll.clock import Clock, RealClock
from atoll.node.manners.activity import Activity
from atoll.node.manners.battery import Battery
from atoll.node.manners.commands import Commands
from atoll.node.manners.lid import Lid
from atoll.node.manners.metered import Metered
from atoll.node.manners.reading import Reading, Sensor, together
from atoll.node.policy import Policy

SLOW_S = 10.0
"""Pause between two readings of a sensor that starts a program."""

ABSENT_S = 300.0
"""The same of one that had nothing to say: this machine has no lid, or no such program."""


class Senses:
    """Reads what a policy asks for."""

    def __init__(
        self,
        *,
        root: Path = Path("/"),
        commands: Commands | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Look below `root`, ask through `commands`."""
        commands = commands or Commands()
        self._clock = clock or RealClock()
        self._battery = Battery(root)
        self._lid = Lid(root=root, commands=commands)
        self._metered = Metered(commands)
        self._activity = Activity(root=root, commands=commands, clock=self._clock)
        self._kept: dict[Sensor, tuple[float, Reading]] = {}

    def read(self, policy: Policy) -> Reading:
        """Return what the policy needs to know; takes up to some seconds, in a thread."""
        readings = [self._battery.read()] if policy.pause_on_battery else []
        if policy.pause_on_lid_close:
            readings.append(self._recent(self._lid))
        if policy.pause_on_metered:
            readings.append(self._recent(self._metered))
        if policy.pause_when_active:
            readings.append(self._recent(self._activity))
        return together(readings)

    def read_all(self) -> Reading:
        """Return everything that can be known now."""
        sensors: list[Sensor] = [self._battery, self._lid, self._metered, self._activity]
        return together(sensor.read() for sensor in sensors)

    def _recent(self, sensor: Sensor) -> Reading:
        """Return a sensor's reading, not older than it is worth."""
        now = self._clock.monotonic()
        until, reading = self._kept.get(sensor, (now, Reading()))
        if now >= until:
            reading = sensor.read()
            self._kept[sensor] = now + (ABSENT_S if reading == Reading() else SLOW_S), reading
        return reading
