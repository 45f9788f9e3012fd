from __future__ import annotations

import pytest

from atoll.config import dump_spec, parse_spec
from atoll.errors import ConfigError

JOB = """
[job]
nodes = {nodes}
{more}
[train]
batch = {batch}
[strategy]
inner = "{inner}"
{outer}
[swarm]
stages = {stages}
microbatches = 8
"""


def job(**changes: object) -> str:
    values = {"nodes": 6, "more": "", "batch": 32, "inner": "swarm", "outer": "", "stages": 4}
    return JOB.format(**(values | changes))


def test_a_swarm_is_read_and_written() -> None:
    spec = parse_spec(job())
    assert (spec.swarm.stages, spec.swarm.microbatches, spec.swarm.codec) == (4, 8, "int8")
    assert spec.mesh.ranks == 1
    assert parse_spec(dump_spec(spec)) == spec


def test_a_job_without_stages_has_no_table_of_them() -> None:
    assert "[swarm]" not in dump_spec(parse_spec("[job]\nnodes = 2\n"))


def test_methods_say_whether_they_meet_in_every_step() -> None:
    assert parse_spec(job(outer='preset = "ddp"')).meets_every_step
    assert not parse_spec(job(outer='preset = "diloco"')).meets_every_step


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": 7}, "a SWARM needs a member for every stage"),
        ({"stages": 0}, "set stages in \\[swarm\\]"),
        ({"inner": "local"}, 'set inner = "swarm" in \\[strategy\\]'),
        ({"more": 'script = "train.py"'}, "only the built-in trainer .* runs a script"),
        ({"batch": 30}, "a multiple of 8"),
        ({"stages": -1}, "stages in \\[swarm\\] must not be negative"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_remedy(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_spec(job(**changes))


def test_processes_of_an_island_cannot_be_a_swarm() -> None:
    with pytest.raises(ConfigError, match="inner = 'swarm' computes on one rank"):
        parse_spec(job() + "[island]\nranks = 2\n")
