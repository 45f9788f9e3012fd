"""Limits of the product that hurry members on, which a busy machine delays for many seconds."""

from __future__ import annotations

import pytest

from atoll.group.routes import direct
from atoll.hub.rounds import service
from atoll.net import member_tls
from atoll.rounds import timing
from tests.patience import PATIENCE_S


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds wait for members that are late, silent or cut off, and members for each other.

    One whose session has ended, e.g. because it was killed, is lost at once all the same.
    """
    for name in ("MIN_GRACE_S", "MIN_TIMEOUT_S", "BROKEN_S", "MAX_BROKEN_S"):
        monkeypatch.setattr(timing, name, PATIENCE_S)
    monkeypatch.setattr(service, "SILENT_S", PATIENCE_S)
    for name in ("FIRST_CONNECT_S", "CONNECT_FLOOR_S"):
        monkeypatch.setattr(direct, name, PATIENCE_S)
    monkeypatch.setattr(member_tls, "HANDSHAKE_S", PATIENCE_S)
