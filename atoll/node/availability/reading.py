"""Readings of a machine's sensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Protocol


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """State of the machine; None: not applicable or unknown."""

    on_battery: bool | None = None
    battery_percent: float | None = None
    metered: bool | None = None
    """The network is paid by volume."""
    idle_s: float | None = None
    """Seconds since the last input."""
    lid_closed: bool | None = None
    sleeping: bool | None = None
    """The machine is about to sleep."""


class Sensor(Protocol):
    """One source of readings; a read may take a second or two and runs in a thread."""

    def read(self) -> Reading:
        """Return the known values; never raises."""
        ...


def combine_sensors(readings: Iterable[Reading]) -> Reading:
    """Merge readings; later values take precedence."""
    known: dict[str, object] = {}
    for reading in readings:
        for field in dataclasses.fields(Reading):
            value = getattr(reading, field.name)
            if value is not None:
                known[field.name] = value
    return Reading(**known)  # type: ignore[arg-type]
