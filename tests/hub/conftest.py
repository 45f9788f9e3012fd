"""A real hub and a group of members at it; files with other wishes have fixtures of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.hub.rounds import service
from atoll.hub.server import HubServer
from atoll.rounds import machine, timing
from tests.hub.alarms.notify_targets import web as web
from tests.hub.membership import Running, options
from tests.patience import PATIENCE_S

LONG_S = 10 * PATIENCE_S
"""Longer than any test waits: what comes only after it does not come."""


@pytest.fixture(autouse=True)
def patient() -> Iterator[None]:
    """Rounds wait for a member that is slow, silent or cut off; one that has ended is lost at once.

    On a busy machine any member may be late, and what a test awaits must not come from a limit.
    """
    with pytest.MonkeyPatch.context() as patch:  # of its own: tests undo theirs
        patch.setattr(machine, "LEAST_READY_S", LONG_S)
        patch.setattr(service, "SILENT_S", PATIENCE_S)
        for name in (
            "MIN_TIMEOUT_S", "MIN_GRACE_S", "MIN_HOLD_S", "MAX_HOLD_S", "BROKEN_S", "MAX_BROKEN_S",
        ):  # fmt: skip
            patch.setattr(timing, name, LONG_S)
        yield


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer(options(tmp_path)) as server:
        yield server


@pytest.fixture
def running(hub: HubServer) -> Iterator[Running]:
    group = Running(hub)
    yield group
    group.close()
