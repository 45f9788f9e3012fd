"""What a process has opened by the time that its job refuses it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from atoll.config import WorkerEnvironment
from atoll.errors import AuthError
from atoll.group.connect import connect_group
from atoll.wire.messages import Failure, Message, Register
from tests.net.small_hub import TOKEN, SmallHub, answer
from tests.node.running import until


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
    until(lambda: not set(threading.enumerate()) - before, timeout_s=20.0)
