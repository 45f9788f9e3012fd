"""What the sensors of a machine say at one moment."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Protocol


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What is known of the machine; None: it has no such thing, or cannot tell."""

    on_battery: bool | None = None
    battery_percent: float | None = None
    metered: bool | None = None
    """The network is paid by volume."""
    idle_s: float | None = None
    """Seconds since somebody touched the machine."""
    lid_closed: bool | None = None
    sleeping: bool | None = None
    """The machine is about to sleep."""


class Sensor(Protocol):
    """One source of readings; a read may take a second or two and runs in a thread."""

    def read(self) -> Reading:
        """Return what it knows; never raises."""
        ...


def combine_sensors(readings: Iterable[Reading]) -> Reading:
    """Return one reading of several; of those that say the same thing the last one counts."""
    known: dict[str, object] = {}
    for reading in readings:
        for field in dataclasses.fields(Reading):
            value = getattr(reading, field.name)
            if value is not None:
                known[field.name] = value
    return Reading(**known)  # type: ignore[arg-type]
