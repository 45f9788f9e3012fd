"""Jobs of one machine that are stopped by Ctrl+C."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from atoll.cli.jobs.interrupts import Interrupts
from atoll.cli.jobs.local import _Outcome, _stop
from atoll.cli.views.job import Watched
from atoll.errors import DeadlineExceeded


class BusyHub:
    """Does not answer in time that it stops the first job; all end at once."""

    def __init__(self) -> None:
        self.stopped: list[str] = []

    @contextlib.contextmanager
    def client(self, *, timeout_s: float) -> Iterator[BusyHub]:
        yield self

    def stop(self, job: str, *, grace_s: float) -> None:
        self.stopped.append(job)
        if job == "first":
            raise DeadlineExceeded("the hub did not answer in time")

    def job(self, job: str) -> dict[str, Any]:
        return {"job": job, "state": "stopped", "members": []}


def test_a_late_answer_keeps_no_other_job_from_its_end() -> None:
    hub = BusyHub()
    running = {"state": "running", "members": []}
    outcome = _Outcome(watched=[Watched(name, view=running) for name in ("first", "second")])
    _stop(SimpleNamespace(hub=hub), outcome, Interrupts())  # type: ignore[arg-type]
    assert hub.stopped == ["first", "second"]
    assert all(one.ended for one in outcome.watched)
