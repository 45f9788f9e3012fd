"""A step of a job, measured on a node of a hub."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.cli.jobs.jobfile import Overrides, parse_text
from atoll.cli.planning import fleet_of_hub
from atoll.cli.planning.fleet_of_hub import START_S, _step_on, _tokens_of


class SlowStart:
    """A clock, and a hub whose job reports its speed after almost all of the time to start."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reports = 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def submit(self, text: str, *, files: dict[str, str]) -> str:
        return "probe-1"

    def metrics(self, job: str, *, after: int) -> dict[str, Any]:
        if self.now < START_S - 1.0:
            return {"last": after, "points": []}
        self.reports += 1
        return {"last": after + 1, "points": [{"values": {"tokens_per_s": 100.0}}]}

    def job(self, job: str) -> dict[str, Any]:
        return {"state": "running"}

    def stop(self, job: str, *, grace_s: float) -> None:
        pass


def test_a_job_that_starts_late_is_measured_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = SlowStart()
    monkeypatch.setattr(fleet_of_hub, "time", hub)
    submission = parse_text("", Overrides(preset="alone"), name="x")
    step_s = _step_on(hub, submission, probe_s=20.0)  # type: ignore[arg-type]
    assert step_s == pytest.approx(_tokens_of(submission.spec) / 100.0)
    assert hub.reports == 40, "one in every half second"
