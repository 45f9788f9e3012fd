"""A job that is followed to its end: nothing that it printed is left out."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from atoll.cli.jobs.follow import _echo
from atoll.cli.views.job import Watched
from atoll.cli.views.live import View
from atoll.cli.views.log_lines import Chatter

PAGE = 3
LINES = [{"member": "w0", "text": f"line {number}"} for number in range(8)]


class Pages:
    """Answers as the hub's client: at most `PAGE` lines at a time."""

    def logs(self, job: str, *, after: int = 0) -> dict[str, Any]:
        found = LINES[after : after + PAGE]
        return {"last": after + len(found), "lines": found}


def echoed(state: str) -> str:
    console = Console(file=io.StringIO(), width=80)
    job = Watched("demo-1", view={"job": "demo-1", "state": state, "members": []})
    view = View(console, dashboard="x")
    _echo(Pages(), job, view, after=0, chatter=Chatter())  # type: ignore[arg-type]
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_last_lines_of_a_job_are_more_than_one_answer() -> None:
    assert echoed("running").count("line") == PAGE
    assert echoed("done").count("line") == len(LINES)
