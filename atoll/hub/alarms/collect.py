"""Collects the facts that alarm rules check, from state that the hub keeps anyway."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from atoll.errors import AtollError
from atoll.hub.alarms.facts import (
    Facts,
    Forecast,
    HubFacts,
    JobFacts,
    LimitedFacts,
    NodeFacts,
    QueueFacts,
)
from atoll.hub.alarms.series import JobMemory, Trend
from atoll.hub.jobs.jobs import Job
from atoll.hub.nodes.services import JobServices
from atoll.hub.nodes.store import Node
from atoll.hub.rounds.timeline import catch_up
from atoll.hub.sessions.session import Session
from atoll.wire.states import JobState

WINDOW_S = 600.0
_KEPT = 32


class LinkHistory:
    """Counts reconnects per address within `WINDOW_S`."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self._returns: dict[str, deque[float]] = {}

    def opened(self, address: str, incarnation: str, now: float) -> None:
        """Record a connection; the same incarnation again is a reconnect."""
        if self._known.get(address) == incarnation:
            self._returns.setdefault(address, deque(maxlen=_KEPT)).append(now)
        else:
            self._known[address] = incarnation

    def count(self, address: str, now: float) -> int:
        """Return the number of recent reconnects of an address."""
        times = self._returns.get(address)
        if times is None:
            return 0
        while times and times[0] < now - WINDOW_S:
            times.popleft()
        if not times:
            del self._returns[address]
        return len(times)

    def forget(self, is_gone: Callable[[str], bool]) -> None:
        """Drop the addresses that are no longer in use."""
        for address in [a for a in self._known if is_gone(a)]:
            del self._known[address]
            self._returns.pop(address, None)


log = logging.getLogger(__name__)

LOOKED_AT_S = 86_400.0
"""Jobs that ended longer ago are ignored."""
QUEUES_S = 5.0
"""Timeout of reading queues, which may be on another server."""
MOST_REACHED = 100
"""Most reached limits reported at once: one process can reach those of many queues."""
LIMITED_S = 30.0
"""How long a session is reported after it was throttled."""
_EVENTS_AT_ONCE = 1_000


class _NodeMemory:
    __slots__ = ("disk", "memory", "ran")

    def __init__(self) -> None:
        self.disk, self.memory = Trend(), Trend()
        self.ran = 0


class FactCollector:
    """Reads what is new since the last evaluation."""

    def __init__(self, services: JobServices, *, version: str, data: Path) -> None:
        self._stores, self._sessions = services.stores, services.sessions
        self._membership, self._rounds = services.membership, services.rounds
        self._swarm = services.swarm
        self._clock, self._version, self._data = services.clock, version, data
        self._jobs: dict[str, JobMemory] = {}
        self._nodes: dict[str, _NodeMemory] = {}
        self._disk = Trend()
        self.links = LinkHistory()

    async def jobs(self) -> list[JobFacts]:
        """Return the facts of running and recently ended jobs."""
        now = self._clock.wall()
        found, looked_at = [], set()
        for record in self._stores.jobs.list():
            if record.state == JobState.WAITING or now - (record.ended or now) > LOOKED_AT_S:
                continue
            looked_at.add(record.job)
            try:
                found.append(await self._job(record, now))
            except AtollError as error:
                log.warning("%s cannot be checked: %s", record.job, error)
        for gone in self._jobs.keys() - looked_at:
            del self._jobs[gone]
        return found

    async def _job(self, record: Job, now: float) -> JobFacts:
        job = record.job
        memory = self._jobs.get(job)
        if memory is None:
            memory = self._jobs[job] = JobMemory(job)
        memory.take_rounds(await catch_up(self._stores.database, job, after=memory.after))
        while True:
            events = await self._stores.events.read(
                job, after=memory.last_event, limit=_EVENTS_AT_ONCE
            )
            memory.take_events(events, record)
            if len(events) < _EVENTS_AT_ONCE:
                break
        running = record.state == JobState.RUNNING
        round_states = {
            name: self._rounds.describe(job, name)["round_state"] if running else None
            for name in record.members
        }
        waits = self._rounds.waiting(job) if running else ([], 0.0)
        found = memory.facts(
            record, now=now, alone=record.spec.alone, round_states=round_states, waits=waits
        )
        return replace(found, swarm=self._swarm.view(job)) if running else found

    async def hub(self) -> HubFacts:
        """Return the facts of the hub itself."""
        usage = await asyncio.to_thread(_disk_usage, self._data)
        disk = None
        if usage is not None:
            self._disk.add(self._clock.monotonic(), float(usage[0]))
            disk = Forecast(
                free_bytes=usage[0], total_bytes=usage[1], full_in_s=self._disk.full_in_s()
            )
        now = self._clock.monotonic()
        limited = [
            LimitedFacts(
                address=session.address,
                frames=session.meter.frames,
                paused_s=session.meter.paused_s,
                frames_per_s=session.meter.rate,
            )
            for session in self._sessions.all()
            if now - session.meter.limited_at < LIMITED_S
        ]
        queues = await self._queues()
        reached = [use for use in await self._stores.ledger.uses() if use.reached][:MOST_REACHED]
        return HubFacts(
            version=self._version, disk=disk, queues=queues, limited=limited, reached=reached
        )

    async def _queues(self) -> list[QueueFacts]:
        """Return the facts of queues; none while their server does not answer."""
        try:
            async with asyncio.timeout(QUEUES_S):
                rows = await self._stores.queue.rows()
        except (AtollError, OSError) as error:
            log.warning("the queues cannot be checked: %s", error)
            return []
        return [_queue(row) for row in rows]

    def nodes(self) -> list[NodeFacts]:
        """Return the facts of all nodes."""
        running: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
        for job in self._stores.jobs.list():
            if job.state == JobState.RUNNING:
                for member in job.processes:
                    if member.live:
                        running[member.node].append((job.job, f"{job.job}/{member.member}"))
        now = self._clock.monotonic()
        for gone in self._nodes.keys() - self._membership.nodes.keys():
            del self._nodes[gone]
        self.links.forget(
            lambda a: a not in self._membership.nodes and self._sessions.get(a) is None
        )
        return [
            self._node(node, running.get(node.node, []), now)
            for node in self._membership.nodes.values()
        ]

    def _node(self, node: Node, running: list[tuple[str, str]], now: float) -> NodeFacts:
        session = self._sessions.get(node.node)
        memory = self._nodes.get(node.node)
        if memory is None:
            memory = self._nodes[node.node] = _NodeMemory()
        online = session is not None and node.connected
        if online:
            memory.ran = len(running)
        reconnects = sum(self.links.count(a, now) for _, a in running)
        return NodeFacts(
            node=node.node,
            online=online,
            draining=node.draining,
            gone_s=0.0 if online else max(0.0, now - node.last_seen),
            ran=memory.ran,
            version=node.info.atoll,
            torch=node.info.torch,
            jobs=sorted({job for job, _ in running}),
            skew_s=self._skew_s(session, now),
            reconnects=reconnects + self.links.count(node.node, now),
            # Nodes do not report the size of their disk; the free space at join replaces it.
            disk=_forecast(
                session,
                "disk_free_bytes",
                memory.disk,
                now,
                total=float(node.info.disk_free_bytes),
            ),
            memory=_forecast(
                session,
                "memory_free_bytes",
                memory.memory,
                now,
                total=float(node.info.memory_bytes),
            ),
        )

    def _skew_s(self, session: Session | None, now: float) -> float | None:
        if session is None:
            return None
        latency_s = session.stats.get("latency_ms", 0.0) / 2_000
        return session.clock.skew_s(wall=self._clock.wall(), monotonic=now, latency_s=latency_s)

    async def facts(self, *, nodes: bool) -> Facts:
        """Return all facts; nodes only if requested, because there may be thousands."""
        return Facts(
            now=self._clock.wall(),
            jobs=await self.jobs(),
            nodes=self.nodes() if nodes else (),
            hub=await self.hub(),
        )


def _forecast(
    session: Session | None, name: str, trend: Trend, now: float, *, total: float
) -> Forecast | None:
    """Return the forecast of a figure of free bytes that nodes report; None: not reported."""
    free = session.stats.get(name) if session is not None else None
    if free is None:
        return None
    trend.add(now, free)
    return Forecast(free_bytes=free, total_bytes=total, full_in_s=trend.full_in_s())


def _disk_usage(folder: Path) -> tuple[int, int] | None:
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        log.warning("the hub's disk cannot be checked: %s", error)
        return None
    return usage.free, usage.total


def _queue(row: Mapping[str, Any]) -> QueueFacts:
    pairs = ((row["ready"] + row["leased"], row.get("max_items")),
             (row.get("bytes") or 0, row.get("max_bytes")))  # fmt: skip
    # Queues that drop the oldest item are full on purpose.
    bounded = row.get("overflow") != "drop-oldest"
    fill = max((used / most for used, most in pairs if most and bounded), default=0.0)
    return QueueFacts(
        queue=row["queue"], ready=row["ready"], dead=row["dead"], fill=fill,
        waiting=row.get("waiting_producers") or 0,
    )  # fmt: skip
