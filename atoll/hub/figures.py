"""What /metrics, telemetry and the pages show beside nodes and jobs: queues, alarms, worth."""

from __future__ import annotations

from typing import Any

from atoll.hub.context import Context


async def queue_rows(context: Context) -> list[dict[str, Any]]:
    """Return the queues with how full they are."""
    depths = await context.stores.queue.depths()
    return [
        {"queue": name, "ready": d.ready, "leased": d.leased, "dead": d.dead}
        for name, d in sorted(depths.items())
    ]


def open_alarms(context: Context) -> list[dict[str, Any]]:
    """Return the alarms that have not ended."""
    alarms: Any = getattr(context.stores, "alarms", None)
    return list(alarms.open()) if alarms is not None else []


async def worth_of(context: Context, job: str) -> dict[str, Any]:
    """Return what each node adds to a job; empty: not known."""
    return {}
