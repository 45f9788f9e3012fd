"""Opens real stores for tests, closes them, and opens them again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from atoll.clock import VirtualClock
from atoll.hub.stores import Stores, open_stores
from tests.patience import PATIENCE_S

BOUND_S = PATIENCE_S

SPEC = '[job]\nname = "toy"\nnodes = 2\n[train]\nsteps = 100\n'


@contextlib.asynccontextmanager
async def opened(folder: Path, clock: VirtualClock) -> AsyncIterator[Stores]:
    stores = await open_stores(folder / "data", jobs_dir=folder / "jobs", clock=clock)
    try:
        yield stores
    finally:
        await stores.close()


def with_stores(
    folder: Path,
    test: Callable[[Stores], Awaitable[None]],
    *,
    clock: VirtualClock | None = None,
) -> None:
    """Run `test` with the stores in a folder."""

    async def work() -> None:
        async with opened(folder, clock or VirtualClock()) as stores:
            await test(stores)

    asyncio.run(asyncio.wait_for(work(), BOUND_S))
