from __future__ import annotations

import pytest

from atoll.config import dump_spec, member_spec, parse_spec
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


DDP, ASYNC = 'preset = "ddp"', '4\nschedule = "async"'


def job(**changes: object) -> str:
    values = {"nodes": 6, "more": "", "batch": 32, "inner": "swarm", "outer": "", "stages": 4}
    return JOB.format(**(values | changes))


def test_a_swarm_is_read_and_written() -> None:
    spec = parse_spec(job())
    assert (spec.swarm.stages, spec.swarm.microbatches, spec.swarm.codec) == (4, 8, "int8")
    assert spec.mesh.ranks == 1
    assert parse_spec(dump_spec(spec)) == spec


def test_a_quarter_is_early_unless_the_job_says_otherwise() -> None:
    assert parse_spec(job()).swarm.early_microbatches == 0
    late = parse_spec(job(outer=DDP, stages=ASYNC))
    assert late.swarm.early_microbatches == 2
    spec = parse_spec(job(outer=DDP, stages=ASYNC + "\nearly = 3"))
    assert spec.swarm.early_microbatches == 3
    assert parse_spec(dump_spec(late)) == late


def test_a_job_without_stages_has_no_table_of_them() -> None:
    assert "[swarm]" not in dump_spec(parse_spec("[job]\nnodes = 2\n"))


def test_methods_say_whether_they_meet_in_every_step() -> None:
    assert parse_spec(job(outer='preset = "ddp"')).meets_every_step
    assert not parse_spec(job(outer='preset = "diloco"')).meets_every_step


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": 7}, "a SWARM needs a member for every stage"),
        ({"stages": "4\nwhole = 3"}, "besides those that hold the whole model"),
        ({"outer": 'preset = "ddp"', "stages": "4\nwhole = 1"}, 'outer = "diloco" .* or whole = 0'),
        ({"stages": 0}, "set stages in \\[swarm\\]"),
        ({"inner": "local"}, 'set inner = "swarm" in \\[strategy\\]'),
        ({"more": 'script = "train.py"'}, "only the built-in trainer .* runs a script"),
        ({"batch": 30}, "a multiple of 8"),
        ({"stages": "4\nearly = 2"}, "early only in an asynchronous schedule"),
        ({"outer": DDP, "stages": ASYNC + "\nearly = 8"}, "all microbatches .* early = 2"),
        ({"outer": 'preset = "diloco"', "stages": ASYNC}, "a gradient in every"),
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


def test_stages_alone_make_a_swarm_of_two_members_each() -> None:
    spec = parse_spec("[swarm]\nstages = 3\n")
    assert (spec.strategy.inner, spec.job.nodes, spec.job.min_nodes) == ("swarm", 6, 3)
    assert spec.model.options["tie"] is False
    bounded = parse_spec("[job]\nnodes = {min = 1, max = 9}\n[swarm]\nstages = 3\n")
    assert (bounded.job.nodes, bounded.job.min_nodes) == (9, 3)
    assert parse_spec('[strategy]\npreset = "swarm"\n').swarm.stages == 2


def test_one_stage_keeps_a_shared_weight() -> None:
    assert "tie" not in parse_spec("[swarm]\nstages = 1\n").model.options
    tied = parse_spec("[model]\ntie = true\n[swarm]\nstages = 2\n")
    assert tied.model.options["tie"] is True, "what is wanted is not changed silently"


@pytest.mark.parametrize(("stages", "cuts"), [(2, [3]), (3, [])])
def test_cuts_that_were_found_for_other_stages_are_dropped(stages: int, cuts: list[int]) -> None:
    """As when a job that `atoll run` has completed is resumed with another number of stages."""
    text = f"[job]\nname = 'a'\nnodes = 6\n[strategy]\npreset = 'swarm'\n[swarm]\nstages = {stages}"
    spec = parse_spec(f"{text}\ncuts = [3]\nneeds_gb = [1.0, 2.0]\n")
    assert spec.swarm.cuts == cuts
    assert spec.swarm.needs_gb == ([1.0, 2.0] if cuts else [])
    assert parse_spec(f"{text}\ncuts = [3]\n").swarm.cuts == [3]  # those of a person are checked


@pytest.mark.parametrize("inner", ["swarm", "fsdp", "pipeline"])
def test_ranks_need_to_know_whose_island_they_are(inner: str) -> None:
    """Another inner strategy would not do: the message names what would."""
    text = job(inner=inner, outer='preset = "diloco"', stages="4\nwhole = 1")
    with pytest.raises(ConfigError, match=r"which members are islands.*whole_inner"):
        parse_spec(text + "[island]\nranks = 2\n")


def whole_islands(inner: str, island: str) -> str:
    stages = f'4\nwhole = 1\nwhole_inner = "{inner}"'
    return job(outer='preset = "diloco"', stages=stages) + f"[island]\n{island}\n"


def test_only_whole_members_are_islands() -> None:
    spec = parse_spec(whole_islands("fsdp", "ranks = 2"))
    assert spec.mesh.ranks == 1
    assert parse_spec(dump_spec(spec)) == spec
    first, stage, reducer = (member_spec(spec, name) for name in ("w0", "w1", "reducer"))
    assert (first.strategy.inner, str(first.mesh)) == ("fsdp", "shard=2")
    assert (stage.strategy.inner, stage.mesh.ranks, reducer.mesh.ranks) == ("swarm", 1, 1)
    assert member_spec(first, "w0") == first


@pytest.mark.parametrize(
    ("inner", "island", "message"),
    [
        ("ddp", "ranks = 0", "needs ranks"),
        ("ddp", "ranks = 3", "3 data ranks"),
        ("ddp", "ranks = 2\nmachines = 2", "machines in .* is not for islands beside"),
        ("pipeline", "ranks = 2\nelastic = true", "elastic in .* is not for islands beside"),
        ("fsdp", 'ranks = 2\non_loss = "shrink"', "start again with all ranks"),
        ("fsdp", 'ranks = 2\nmemory = "disk"', "memory in .* is not for islands beside"),
        ("swarm", "ranks = 2", "unknown whole_inner .* ddp, fsdp"),
    ],
)
def test_islands_beside_a_swarm_that_are_refused(inner: str, island: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_spec(whole_islands(inner, island))


def test_islands_need_members_with_the_whole_model() -> None:
    with pytest.raises(ConfigError, match="this job has none"):
        parse_spec(job(stages='4\nwhole_inner = "ddp"') + "[island]\nranks = 2\n")
