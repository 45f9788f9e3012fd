"""A job is refused before it is sent where the hub lacks what it names."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.cli.jobs.jobfile import Submission
from atoll.cli.jobs.submit import check_nodes
from atoll.config import read_spec
from atoll.errors import ConfigError

NODES: list[dict[str, Any]] = [{"node": "lap2"}, {"node": "lap3-9f3a"}]


@pytest.mark.parametrize(
    ("named", "said"), [("lpa2", "did you mean lap2?"), ("attic", "`atoll status`")]
)
def test_machine_that_never_joined_is_refused(named: str, said: str) -> None:
    job = Submission(read_spec({"job": {"on": [named]}}), {})
    with pytest.raises(ConfigError, match="no machine of this name has joined the hub") as caught:
        check_nodes([job], NODES)
    assert said in str(caught.value.remedy)
    assert caught.value.expected == "lap2, lap3-9f3a"


def test_machine_is_named_with_or_without_its_ending() -> None:
    check_nodes([Submission(read_spec({"job": {"on": ["lap2", "lap3"]}}), {})], NODES)
