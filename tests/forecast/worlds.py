"""Fleets and workloads of tests."""

from __future__ import annotations

from atoll.fleet.fleet import Fleet, Machine
from atoll.forecast.workload import Workload


def fleet(*speeds: float, **figures: float) -> Fleet:
    """Return machines of one site with these seconds per step."""
    line = {"up_mbps": 50.0, "down_mbps": 100.0, "latency_ms": 20.0, "memory_gb": 16.0} | figures
    return Fleet(
        machines=tuple(
            Machine(name=f"m{number}", step_s=step_s, site="lab", **line)  # type: ignore[arg-type]
            for number, step_s in enumerate(speeds)
        )
    )


def workload(parameters: int = 1_000_000, **more: object) -> Workload:
    """Return a job of 4,096 tokens a step."""
    figures = {"name": "gpt", "tokens": 4096, "steps": 2000, "optimizer": "adamw"} | more
    return Workload(parameters=parameters, elements=parameters, **figures)  # type: ignore[arg-type]
