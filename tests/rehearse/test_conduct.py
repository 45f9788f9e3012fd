"""How a rehearsal follows its job, by the files that a hub leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.errors import JobError
from atoll.rehearse.conduct import _Watch
from atoll.rehearse.rehearsal import slowed
from atoll.rehearse.site import Site
from tests.rehearse.plays import fleet, rehearsal


def test_a_job_that_fails_at_once_is_not_waited_for(tmp_path: Path) -> None:
    plan, _ = rehearsal(fleet(0.1, 0.1, 0.2))
    site = Site(slowed(plan), tmp_path)
    (site.jobs / "j").mkdir(parents=True)
    event = {"kind": "failed", "text": "no such corpus"}
    (site.jobs / "j" / "events.jsonl").write_text(json.dumps(event) + "\n", encoding="utf-8")

    def pause(seconds: float) -> bool:
        pytest.fail("it waits for members that never begin")

    with pytest.raises(JobError, match="no such corpus"):
        _Watch(plan, site, "j").follow(limit_s=1.0, pause=pause, say=lambda text: None)
