"""Jobs are named in full or by a prefix, and a wrong name gets the names there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.cli.jobs.names import full_name, jobs_named, local_run
from atoll.errors import JobError

NAMES = ["gpt-20261125-214948", "gpt-20261124-101112", "demo-20261125-215102"]


def test_prefix_of_one_job_is_enough() -> None:
    assert full_name("demo", NAMES) == "demo-20261125-215102"
    assert full_name("gpt-20261124", NAMES) == "gpt-20261124-101112"
    assert full_name("gpt", ["gpt", "gpt-2"]) == "gpt"
    assert jobs_named(["demo", "demo-2"], NAMES) == ["demo-20261125-215102"]


def test_prefix_of_several_jobs_lists_them() -> None:
    with pytest.raises(JobError, match=r"2 jobs begin with 'gpt'.*214948.*101112"):
        full_name("gpt", NAMES)


def test_of_several_jobs_the_one_that_runs_is_meant() -> None:
    assert full_name("gpt", NAMES, preferred=[NAMES[1]]) == NAMES[1]
    with pytest.raises(JobError, match="2 jobs"):
        full_name("gpt", NAMES, preferred=NAMES)


def test_unknown_job_names_those_there_are_and_the_likely_one() -> None:
    with pytest.raises(JobError, match=r"no such job.*'dmeo'.*did you mean demo-20261125-215102\?"):
        full_name("dmeo", NAMES)
    with pytest.raises(JobError, match=r"expected: gpt-20261125-214948.*atoll status"):
        full_name("zzzzz", NAMES)
    with pytest.raises(JobError, match="the hub has none"):
        full_name("gpt", [])


def test_run_on_this_machine_is_found_by_its_prefix(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.toml").touch()
    (tmp_path / "bare").mkdir()
    assert local_run("demo", tmp_path) == tmp_path / NAMES[2]
    assert local_run(str(tmp_path / "demo"), Path("elsewhere")) == tmp_path / NAMES[2]
    assert local_run("bare", tmp_path) is None
    assert local_run("other", tmp_path) is None
    with pytest.raises(JobError, match="2 jobs"):
        local_run("gpt", tmp_path)
