"""What the suites of queues and topics have in common."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from atoll.clock import VirtualClock
from atoll.hub.queues.backend import Capabilities
from atoll.hub.queues.queues import Queues
from atoll.wire.messages import QueueOptions

T = TypeVar("T")

MAX_ATTEMPTS = 3
OPTIONS = QueueOptions(max_attempts=MAX_ATTEMPTS)
LEASE_S = 100.0
"""By the virtual clock; a server that holds leases itself counts real seconds, which never are so
many in one test."""
BOUND_S = 60.0
"""Longest that any wait of these tests may take."""


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, BOUND_S))


class QueueBase:
    """How a suite opens what it tests. Items of queue `q` are dead after `MAX_ATTEMPTS`."""

    clock: VirtualClock
    folder: Path
    durable = False
    """Whether what is opened again holds what was stored."""
    capabilities = Capabilities()
    """Which clauses the backend keeps."""

    @pytest.fixture(autouse=True)
    def _prepare(self, tmp_path: Path) -> None:
        self.clock, self.folder = VirtualClock(), tmp_path

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Queues]:
        raise NotImplementedError  # abstract: each backend opens its own
        yield

    def with_queue(self, test: Callable[[Queues], Awaitable[None]]) -> None:
        async def work() -> None:
            async with self.open() as queue:
                await queue.declare("q", OPTIONS)
                await test(queue)

        run(work())
