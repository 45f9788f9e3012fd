"""The benchmark of an accelerator: its jobs are jobs, and a part that fails is named."""

from __future__ import annotations

import pytest

from atoll.config import parse_spec
from bench.accelerator import __main__ as parts
from bench.accelerator import job


@pytest.mark.parametrize("kind", ["", "cuda"])
@pytest.mark.parametrize("members", [1, 2])
def test_its_jobs_say_nothing_of_devices(
    kind: str, members: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "accelerator", lambda: kind)
    text = job.spec_for(quick=True, members=members)
    spec = parse_spec(text, name="the job")
    assert "device" not in text
    assert (spec.job.nodes, spec.job.device) == (members, "auto")


def test_a_part_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(parts.PARTS, "no_such_part", 60)
    found = parts.run("no_such_part", quick=True)
    assert found["error"] == "exit status 1"
    assert "no_such_part" in found["stderr"]
