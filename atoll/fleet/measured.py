"""A fleet from what a hub already knows of its nodes: rows of GET /api/nodes."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from atoll.errors import ConfigError
from atoll.fleet.fleet import MBPS, Fleet, HubLine, Link, Machine
from atoll.fleet.reading import check_fleet, unmeasured

Row = Mapping[str, Any]

WATCHED_S = 3600.0
"""Shortest span of events from which a rate of disconnections is derived."""
DAY_S = 86_400.0
ONLINE = "online"
"""`NodeState.ONLINE`, from a package that this one does not import."""
LOST = "node-lost"
"""Kind of the event; its text begins with the node."""


def fleet_of_nodes(
    rows: Sequence[Row],
    *,
    step_s: Mapping[str, float] | None = None,
    failures_per_day: Mapping[str, float] | None = None,
    links: Sequence[Link] = (),
) -> Fleet:
    """Return the machines that are online, with the speeds and rates that the hub received.

    Args:
        rows: Nodes as the hub lists them.
        step_s: Measured seconds of a step of this job, by node.
        failures_per_day: Past disconnections, by node.
        links: Measured between nodes.

    Raises:
        ConfigError: no node is online.
    """
    machines = [
        dataclasses.replace(
            _machine(row),
            step_s=(step_s or {}).get(row["node"], 0.0),
            failures_per_day=(failures_per_day or {}).get(row["node"], 0.0),
        )
        for row in rows
        if row.get("state") == ONLINE
    ]
    if not machines:
        raise ConfigError(
            "no machine is online at this hub", given=f"{len(rows)} known",
            remedy="start one with `atoll join`, or plan for a file: --machines fleet.toml",
        )  # fmt: skip
    fleet = Fleet(machines=tuple(machines), links=tuple(links), hub=HubLine())
    check_fleet(fleet)
    return dataclasses.replace(fleet, notes=tuple(_notes(fleet)))


def _machine(row: Row) -> Machine:
    info, stats = row.get("info") or {}, row.get("stats") or {}
    offer = info.get("offer") or {}
    memory = info.get("gpu_memory_bytes") or info.get("memory_bytes") or 0
    return Machine(
        name=str(row["node"]),
        gflops=float(info.get("matmul_gflops") or 0.0),
        memory_gb=round(memory / 1e9, 3),
        up_mbps=round(_least(stats.get("up_bps"), offer.get("upload_bps")) / MBPS, 3),
        down_mbps=round(_least(stats.get("down_bps"), offer.get("download_bps")) / MBPS, 3),
        latency_ms=round(float(stats.get("latency_ms") or 0.0), 3),
    )


def _least(measured: Any, offered: Any) -> float:
    """Return the lower of two rates; 0 is one that is not known, or no limit."""
    known = [float(rate) for rate in (measured, offered) if rate]
    return min(known, default=0.0)


def _notes(fleet: Fleet) -> Iterator[str]:
    for what, names in unmeasured(fleet).items():
        yield f"{what} of {', '.join(names)} was not measured yet"


def failures_of_events(events: Sequence[Row], *, now: float) -> dict[str, float]:
    """Return how often a day each node left without notice, from the hub's own events.

    Empty if the events cover less than an hour: too short a time for a rate.
    """
    since = min((float(event["time"]) for event in events), default=now)
    if now - since < WATCHED_S:
        return {}
    lost = Counter(
        str(event["text"]).partition(" ")[0] for event in events if event["kind"] == LOST
    )
    return {node: round(count * DAY_S / (now - since), 3) for node, count in lost.items()}
