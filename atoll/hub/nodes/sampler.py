"""Samples nodes for the history, flushes metrics to disk, and deletes old ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from atoll.clock import Clock
from atoll.hub.nodes.membership import Membership
from atoll.hub.observability.history import DAY_S, FINEST_S, HOUR_S
from atoll.hub.sessions.session import Sessions
from atoll.hub.stores import Stores

NODES_PER_S = 50
"""Nodes sampled per second: with thousands of them each is sampled less often."""

CONDENSED_AFTER_S = DAY_S
"""How long the points of an ended job keep their full resolution."""

NodeStats = tuple[str, Mapping[str, float]]


def node_stats(membership: Membership, sessions: Sessions) -> Iterator[NodeStats]:
    """Yield every connected node with the statistics of its last heartbeat."""
    for name, node in membership.nodes.items():
        session = sessions.get(name)
        if node.connected and session is not None and session.stats:
            yield name, session.stats


class HubSampler:
    """Called often; acts at its own intervals."""

    def __init__(self, stores: Stores, *, clock: Clock) -> None:
        self._stores = stores
        self._clock = clock
        self._sample_at = self._trim_at = 0.0
        self._condensed: set[str] = set()

    async def tick(self, nodes: Iterable[NodeStats]) -> None:
        """Sample the nodes and flush, every ten seconds or less often; trim every hour."""
        now = self._clock.monotonic()
        if now < self._sample_at:
            return
        history, wall, count = self._stores.history, self._clock.wall(), 0
        for name, stats in nodes:
            history.note(f"node/{name}", wall, stats)
            count += 1
        self._sample_at = now + max(FINEST_S, count / NODES_PER_S)
        await history.flush()
        if now >= self._trim_at:
            self._trim_at = now + HOUR_S
            await history.trim()
            await self._condense()

    async def close(self) -> None:
        """Flush pending samples."""
        await self._stores.history.flush()

    async def _condense(self) -> None:
        """Thin the points of jobs that ended a while ago."""
        before = self._clock.wall() - CONDENSED_AFTER_S
        jobs = self._stores.jobs.list()
        self._condensed.intersection_update(job.job for job in jobs)  # others are deleted
        for job in jobs:
            over = job.over and job.ended is not None and job.ended < before
            if over and job.job not in self._condensed:
                await self._stores.metrics.condense(job.job)
                self._condensed.add(job.job)
            elif not over:
                self._condensed.discard(job.job)
