"""What a process has opened by the time that its job refuses it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from atoll.config import WorkerEnvironment
from atoll.errors import AuthError
from atoll.group.connect import Connection, connect_group
from atoll.group.hub import HubGroup
from atoll.wire.messages import Done, Failure, Finished, Message, Register, Registered
from tests.net.small_hub import TOKEN, SmallHub, answer, linked
from tests.node.running import until
from tests.patience import PATIENCE_S


def test_a_refused_member_leaves_no_listener_behind(tmp_path: Path) -> None:
    def refuse(body: Message) -> Message:
        if isinstance(body, Register):
            return Failure(AuthError("this job has ended").to_dict())
        return answer(body)

    before = set(threading.enumerate())
    with SmallHub() as hub:
        hub.answer = refuse
        environment = WorkerEnvironment(
            hub=hub.url, token=TOKEN, job="job", member="w0", directory=tmp_path,
            spec=tmp_path / "job.toml",
        )  # fmt: skip
        with pytest.raises(AuthError, match="has ended"):
            connect_group(environment)
    until(lambda: not set(threading.enumerate()) - before, timeout_s=PATIENCE_S)


def test_a_group_that_fails_to_close_still_ends_the_session(tmp_path: Path) -> None:
    class Unclosable(HubGroup):
        def close(self) -> None:
            super().close()
            raise OSError("a line cannot be closed")

    with SmallHub() as hub, linked(hub, "job/w0") as (link,):
        hub.answer = lambda body: Done() if isinstance(body, Finished) else answer(body)
        environment = WorkerEnvironment(
            hub=hub.url, token=TOKEN, job="job", member="w0", directory=tmp_path,
            spec=tmp_path / "job.toml",
        )  # fmt: skip
        group = Unclosable(link, job="job", member="w0", hub=hub.url, route="relay")
        connection = Connection(environment, link, group, Registered(0, 1, 0, False))
        with pytest.raises(OSError, match="cannot be closed"):
            connection.close(Finished(True))
        assert any(isinstance(body, Finished) for body in hub.received)
        assert not link.connected
