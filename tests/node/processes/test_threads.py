"""Work that is not waited for at the end."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from atoll.errors import HubError
from atoll.node.processes.threads import run_abandonable
from tests.patience import PROMPT_S


def test_results_and_errors_come_back() -> None:
    def fail() -> None:
        raise HubError("no")

    assert asyncio.run(run_abandonable(lambda: 7)) == 7
    with pytest.raises(HubError, match="no"):
        asyncio.run(run_abandonable(fail))


def test_work_that_hangs_does_not_hold_up_the_end() -> None:
    let_go = threading.Event()

    async def scenario() -> None:
        task = asyncio.create_task(run_abandonable(lambda: let_go.wait(600)))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    begun = time.monotonic()
    asyncio.run(scenario())
    assert time.monotonic() - begun < PROMPT_S
    let_go.set()
