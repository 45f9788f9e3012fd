"""Small fleets for tests."""

from __future__ import annotations

from typing import Any

from atoll.fleet.fleet import Fleet, HubLine, Machine
from atoll.simulate.setting import Setting


def fleet_of(count: int, *, hub_mbps: float = 1000.0, **machine: Any) -> Fleet:
    """Return equal machines."""
    figures = {"step_s": 1.0, "up_mbps": 100.0, "down_mbps": 100.0, **machine}
    return Fleet(
        machines=tuple(Machine(name=f"m{number}", **figures) for number in range(count)),
        hub=HubLine(up_mbps=hub_mbps, down_mbps=hub_mbps),
    )


def setting_of(fleet: Fleet, **changes: Any) -> Setting:
    """Return a short simulation."""
    figures: dict[str, Any] = {
        "every": 100, "exchange_bytes": 10e6, "duration_s": 7200.0, "jitter": 0.0, **changes,
    }  # fmt: skip
    return Setting(fleet=fleet, **figures)
