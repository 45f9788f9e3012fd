"""The command line checks a job on the defaults that its workers use."""

from __future__ import annotations

import pytest

from atoll.cli.jobs import precheck
from atoll.config import JobSpec, parse_spec
from atoll.methods.periodic import DiLoCo
from atoll.strategies import compatibility
from atoll.strategies.resolve import Resolved
from atoll.train.build import build

JOB = """
[job]
nodes = 2
[model]
layers = 1
width = 16
heads = 2
context = 16
[train]
steps = 20
[strategy]
every = 5
"""


def test_precheck_and_workers_check_the_same_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Resolved] = []
    check = compatibility.check

    def watched(resolved: Resolved, **about: object) -> None:
        seen.append(resolved)
        check(resolved, **about)  # type: ignore[arg-type]

    monkeypatch.setattr(compatibility, "check", watched)
    spec: JobSpec = parse_spec(JOB)
    precheck.check_names(spec)
    build(spec, member="w0", slot=0, num_slots=2)
    at_submit, at_work = seen
    assert at_submit == at_work
    assert isinstance(at_work.method, DiLoCo)
    assert at_work.method.shared_steps == 2  # a tenth of the run, not the preset's 170
