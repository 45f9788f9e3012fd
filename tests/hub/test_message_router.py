from __future__ import annotations

import sqlite3
from typing import Any

import pytest

from atoll.hub.sessions.rejections import RejectionCounts
from atoll.wire.messages import Failure, ProcessState
from atoll.wire.states import ProcessPhase
from tests.hub.membership import Running


def test_a_refusal_that_cannot_be_recorded_is_answered(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: Any) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(RejectionCounts, "note", fails)
    other = ProcessState(running.job, "w1", ProcessPhase.EXITED, exit_code=1, attempt=1)
    answer = running.members[0].request(other)
    assert isinstance(answer, Failure)
    assert answer.error["kind"] == "AuthError"
