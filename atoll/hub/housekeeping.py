"""What a hub does at regular intervals, whatever its clients ask."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from atoll.hub.nodes.sampler import node_stats

if TYPE_CHECKING:
    from atoll.hub.app import Hub

logger = logging.getLogger(__name__)

SWEEP_S, TICKS_PER_SECOND = 0.25, 4
BLOBS_EVERY_S = 600

Part = Callable[[], object]
"""Returns an awaitable if there is something to wait for."""


class Housekeeping:
    """Calls all parts again and again; one that fails does not keep the others from their turn."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._reckoned = False

    async def run(self) -> None:
        """Work until cancelled."""
        hub, count = self._hub, 0
        reckon_at = hub.clock.monotonic() + hub.options.restart_grace_s
        while True:
            await asyncio.sleep(SWEEP_S)
            count += 1
            for part in self._due(count):
                await _call(part)
            if not self._reckoned and hub.clock.monotonic() >= reckon_at:
                await _call(self._reckon)

    def _due(self, count: int) -> Iterator[Part]:
        """Yield the parts of a tick, in their order."""
        hub = self._hub
        yield hub.sessions.sweep
        yield hub.rounds.tick
        yield hub.grouped.swarm.tick
        yield hub.grouped.paths.tick
        yield hub.verification.tick
        if count % TICKS_PER_SECOND == 0:
            yield hub.scheduler.tick
            yield hub.stores.queue.expire
            yield lambda: hub.sampler.tick(node_stats(hub.membership, hub.sessions))
            yield hub.deletions.tick
            yield hub.limiter.settle
            yield hub.retention.tick
        if count % (TICKS_PER_SECOND * BLOBS_EVERY_S) == 0:
            yield lambda: hub.tasks.start(hub.stores.blobs.sweep(), name="sweep of blobs")

    async def _reckon(self) -> None:
        """Handle what did not reconnect in time after a restart of the hub; until it succeeds."""
        await self._hub.membership.reckon()
        await self._hub.scheduler.reckon()
        self._reckoned = True


async def _call(part: Part) -> None:
    try:
        found = part()
        if inspect.iscoroutine(found):
            await found
    except Exception:
        logger.exception("housekeeping failed")
