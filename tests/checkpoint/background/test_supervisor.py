"""Which order is written again after a writer's death."""

from __future__ import annotations

import sys
from pathlib import Path

from atoll.checkpoint import FolderTarget
from atoll.checkpoint.background.messages import WriteOrder, WriterSetup
from atoll.checkpoint.background.supervisor import Supervisor
from atoll.checkpoint.files import unobserved


def test_newest_round_is_kept_after_an_older_one_was_sent_again(tmp_path: Path) -> None:
    setup = WriterSetup(FolderTarget(folder=str(tmp_path)))
    supervisor = Supervisor(
        setup, inherited=(), publish=None, on_event=None, command=(sys.executable, "-c", ""),
        moment=unobserved,
    )  # fmt: skip
    supervisor.close()  # its thread is over: this test takes its place
    for slot, round_ in enumerate((1, 2)):
        supervisor.take(
            WriteOrder(number=0, round=round_, step=round_, stamp="", members=["w0"], regions=[],
                       versions={}),
            slot=slot,
        )  # fmt: skip
    supervisor._repeat(1)  # under a higher number than that of the newer one
    supervisor._replace()
    assert [task.order.round for task in supervisor._tasks.values()] == [2]
