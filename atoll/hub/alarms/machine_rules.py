"""Alarm rules on nodes and the hub's machine."""

from __future__ import annotations

from collections.abc import Iterator

from atoll.hub.alarms.engine import Finding, Severity
from atoll.hub.alarms.facts import Facts, Forecast

FLAPS = 4
"""Reconnects in ten minutes."""
SOON_S = 3_600.0
LOW_SHARE = 0.05
LEAST_BYTES = 200e6
"""Threshold where the size of a disk is unknown."""
SKEW_S, BAD_SKEW_S = 5.0, 60.0
LOST_S, FORGOTTEN_S = 20.0, 86_400.0
"""A lost node is reported from the first to the second of these."""

HUB = "hub"


def flapping_link(facts: Facts) -> Iterator[Finding]:
    """Find nodes that reconnect repeatedly."""
    for node in facts.nodes:
        if node.reconnects >= FLAPS:
            yield Finding(
                kind="flapping-link",
                node=node.node,
                value=float(node.reconnects),
                cause=f"the connection of {node.node} broke {node.reconnects} times in 10 minutes",
                remedy="use a cable instead of wireless, move it closer, or check its "
                f"router; until then: atoll drain {node.node}",
            )


def disk_filling(facts: Facts) -> Iterator[Finding]:
    """Find disks that are nearly full, or will be full within an hour."""
    for node in facts.nodes:
        if node.online and node.disk is not None:
            yield from _filling(
                "disk-filling", node.node, f"the disk of {node.node}", node.disk,
                f"free some space on {node.node}; folders of old jobs and cached code are in its "
                "ATOLL_HOME",
            )  # fmt: skip
    if facts.hub.disk is not None:
        yield from _filling(
            "disk-filling", HUB, "the hub's disk", facts.hub.disk,
            "free some space there: old runs and their checkpoints (keep = ... under "
            "[checkpoint]) take most; jobs wait while it is full, and keep what they trained",
        )  # fmt: skip


def memory_filling(facts: Facts) -> Iterator[Finding]:
    """Find nodes that run out of memory."""
    for node in facts.nodes:
        if node.online and node.memory is not None:
            yield from _filling(
                "memory-filling", node.node, f"the memory of {node.node}", node.memory,
                "use a smaller batch, or limit the memory of its jobs: memory_gb under [needs]; "
                f"or move its work away: atoll drain {node.node}",
            )  # fmt: skip


def _filling(kind: str, node: str, what: str, forecast: Forecast, remedy: str) -> Iterator[Finding]:
    free, total = forecast.free_bytes, forecast.total_bytes
    share = free / total if total > 0 else 1.0
    low = share < LOW_SHARE or (kind == "disk-filling" and free < LEAST_BYTES)
    soon = forecast.full_in_s is not None and forecast.full_in_s < SOON_S
    if not (low or soon):
        return
    text = f"{what} has {size(free)} left" + (f" ({share:.0%})" if total > 0 else "")
    if soon and forecast.full_in_s is not None:
        text += f" and is full in {forecast.full_in_s / 60:.0f} minutes at this rate"
    severity: Severity = "critical" if share < LOW_SHARE / 5 or free < LEAST_BYTES else "warning"
    yield Finding(kind=kind, node=node, value=free, cause=text, remedy=remedy, severity=severity)


def size(nbytes: float) -> str:
    """Format a number of bytes."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes / 1e3:.0f} kB"


def clock_skew(facts: Facts) -> Iterator[Finding]:
    """Find nodes with a wrong clock."""
    for node in facts.nodes:
        skew_s = node.skew_s
        if node.online and skew_s is not None and abs(skew_s) > SKEW_S:
            way = "ahead of" if skew_s > 0 else "behind"
            yield Finding(
                kind="clock-skew",
                severity="critical" if abs(skew_s) > BAD_SKEW_S else "warning",
                node=node.node,
                value=skew_s,
                cause=f"the clock of {node.node} is {abs(skew_s):.0f} s {way} the hub's",
                remedy=f"enable time synchronisation on {node.node}: sudo timedatectl set-ntp true",
            )


def version_mismatch(facts: Facts) -> Iterator[Finding]:
    """Find nodes with another Atoll version than the hub or another torch than their job."""
    for node in facts.nodes:
        if node.online and node.version and node.version != facts.hub.version:
            yield Finding(
                kind="version-mismatch",
                node=node.node,
                cause=f"{node.node} runs Atoll {node.version}, the hub {facts.hub.version}",
                remedy=f"on {node.node}: pip install 'atoll[train]=={facts.hub.version}', then "
                "start atoll join again",
            )
    by_job: dict[str, dict[str, list[str]]] = {}
    for node in facts.nodes:
        for job in node.jobs if node.online and node.torch else ():
            by_job.setdefault(job, {}).setdefault(_release(node.torch), []).append(node.node)
    for job, versions in by_job.items():
        if len(versions) < 2:
            continue
        fewest = min(versions, key=lambda v: (len(versions[v]), v))
        usual = max(versions, key=lambda v: (len(versions[v]), v))
        for name in versions[fewest]:
            yield Finding(
                kind="version-mismatch",
                job=job,
                node=name,
                key="torch",
                cause=f"{name} trains {job} with torch {fewest}, others with {usual}",
                remedy=f"on {name}: pip install torch=={usual}; until then checkpoints and "
                "numbers may differ between machines",
            )


def _release(version: str) -> str:
    return version.partition("+")[0]


def node_lost(facts: Facts) -> Iterator[Finding]:
    """Find nodes that disconnected without draining."""
    for node in facts.nodes:
        if node.online or node.draining or not LOST_S <= node.gone_s <= FORGOTTEN_S:
            continue
        ran = f"; it ran {node.ran} process{'es' * (node.ran > 1)}" if node.ran else ""
        yield Finding(
            kind="node-lost",
            severity="critical" if node.ran else "warning",
            node=node.node,
            value=node.gone_s,
            cause=f"{node.node} has been unreachable for {duration(node.gone_s)}{ran}",
            remedy=f"switch {node.node} on, or check its network; it reconnects by itself. If "
            "it is gone for good, nothing needs to be done: its work was moved",
        )


def duration(seconds: float) -> str:
    """Format a time span."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7_200 else f"{seconds / 3_600:.1f} h"
