from __future__ import annotations

import pytest

from atoll.hub.server import HubServer
from tests.hub.membership import until


def test_a_part_that_always_fails_keeps_no_other(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert hub.hub is not None
    late = hub.hub.limiter
    settle, settled = late.settle, list[bool]()

    def fails() -> None:
        raise OSError("disk I/O error")

    def settles() -> None:
        settle()
        settled.append(True)

    monkeypatch.setattr(hub.hub.sessions, "sweep", fails)
    monkeypatch.setattr(late, "settle", settles)
    until(lambda: bool(settled), "a later part")
    assert "housekeeping failed" in caplog.text
