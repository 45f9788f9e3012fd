"""Keys that are `auto`: what stays open, and what the planner writes there."""

from __future__ import annotations

import pytest

from atoll.config import JobSpec, dump_spec, parse_spec
from atoll.errors import ConfigError
from atoll.forecast.automatic import answer_again, answer_keys, answered
from atoll.forecast.candidates import Candidate
from atoll.forecast.keys import is_open, open_keys, without_auto
from tests.forecast.worlds import fleet

JOB = """
[job]
nodes = 2
[model]
layers = 1
width = 32
[train]
steps = 1000
[strategy]
preset = "diloco"
outer_lr = 0.5
"""


def job(more: str = "") -> JobSpec:
    return parse_spec(JOB + more)


def test_only_what_is_auto_is_open() -> None:
    assert not is_open(job(), plan="")
    assert is_open(job(), plan="auto")
    assert open_keys(job('every = "auto"')) == ("every",)
    left = without_auto(job('every = "auto"'))
    assert dict(left.strategy.options) == {"outer_lr": 0.5}


def test_another_word_than_auto_is_refused() -> None:
    with pytest.raises(ConfigError, match="this plan is not known"):
        is_open(job(), plan="best")


def test_the_interval_grows_with_the_time_of_a_round() -> None:
    found = []
    for mbps in (1000.0, 0.5):
        machines = fleet(0.02, 0.02, up_mbps=mbps, down_mbps=mbps, latency_ms=mbps and 5.0)
        spec, ranking = answer_keys(job('every = "auto"'), machines)
        found.append(int(spec.strategy.options["every"]))
        assert spec.strategy.options["outer_lr"] == 0.5
        assert len(ranking.best.candidate.members) == 2  # all machines of the job take part
    assert found[0] < found[1]


def test_a_whole_plan_sets_method_members_and_route() -> None:
    one = Candidate(
        preset="local-sgd", members=("m1", "m0"), codec="fp32", route="direct",
        options={"every": 25},
    )  # fmt: skip
    spec = answered(job(), one)
    assert (spec.strategy.preset, dict(spec.strategy.options)) == ("local-sgd", {"every": 25})
    assert (spec.job.nodes, spec.job.on, spec.job.route) == (2, ["m1", "m0"], "direct")


FAR = """
[job]
nodes = 8
route = "direct"
[model]
layers = 1
width = 32
heads = 2
context = 32
[train]
steps = 1000
[strategy]
preset = "local-sgd"
codec = "fp32"
every = "auto"
"""


def test_an_open_collective_is_chosen_for_the_lines() -> None:
    far = fleet(*[0.1] * 8, latency_ms=100.0, up_mbps=500.0, down_mbps=500.0)
    spec, ranking = answer_keys(parse_spec(FAR), far)
    # Few bytes on long lines: fewer hops than a ring's fourteen.
    assert spec.strategy.collective == ranking.best.candidate.collective
    assert spec.strategy.collective not in ("auto", "ring")
    named, _ = answer_keys(parse_spec(FAR + 'collective = "ring"'), far)
    assert named.strategy.collective == "ring"
    robust, _ = answer_keys(parse_spec(FAR + 'aggregate = "median"'), far)
    assert robust.strategy.collective == "auto"


def test_a_running_job_keeps_what_is_nearly_as_good() -> None:
    spec = job("every = 25")
    far = fleet(0.02, 0.02, up_mbps=0.5, down_mbps=0.5, latency_ms=0.5)
    reply = answer_again(spec, far, ["every"], current={})
    every = reply["answers"]["every"]
    assert every > 25
    assert reply["progress"] > 1.02
    again = answer_again(spec, far, ["every"], current={"every": every})
    assert (again["answers"], again["progress"]) == ({"every": every}, 1.0)
    near = every + 1  # as good but for noise, and none of the usual intervals
    assert answer_again(spec, far, ["every"], current={"every": near})["answers"]["every"] == near


def test_what_a_planner_answered_is_planned_again() -> None:
    machines = fleet(0.02, 0.02, up_mbps=50.0, down_mbps=50.0, latency_ms=5.0)
    spec, _ = answer_keys(job('every = "auto"'), machines)
    assert spec.job.planned == ["every", "collective"]
    assert spec.planned_again == ["every", "collective"]
    adapting, _ = answer_keys(job('every = "auto"\ncodec = "auto"'), machines)
    # Not the collective: the codec may not be one that sums on the way.
    assert adapting.job.planned == ["every", "codec"]


STREAMING = """
[job]
nodes = 2
[model]
layers = 1
width = 64
[train]
steps = 1000
[strategy]
preset = "streaming-diloco"
codec = "feedback(auto)"
every = 40
delay = "auto"
"""


def test_all_four_are_answered_by_one_planner() -> None:
    text = STREAMING.replace("every = 40", 'every = "auto"')
    assert open_keys(parse_spec(text)) == ("every", "delay", "codec")
    near = fleet(0.02, 0.02, up_mbps=1000.0, down_mbps=1000.0, latency_ms=0.2)
    far = fleet(0.02, 0.02, up_mbps=1.0, down_mbps=1.0, latency_ms=50.0)
    quick, slow = (answer_keys(parse_spec(text), one)[0].strategy for one in (near, far))
    assert quick.codec == "feedback(auto:fp32)"
    assert slow.codec in ("feedback(auto:bf16)", "feedback(auto:int8:256)")  # hidden: few will do
    delays = [int(str(one.options["delay"]).removeprefix("auto:")) for one in (quick, slow)]
    assert delays[0] < delays[1]
    spec, _ = answer_keys(parse_spec(text), far)
    assert open_keys(spec) == ()
    assert spec.job.planned == ["delay", "codec"]  # not every: fragments are a schedule
    assert parse_spec(dump_spec(spec)) == spec


def test_codec_and_delay_of_a_running_job_follow_its_lines() -> None:
    far = fleet(0.02, 0.02, up_mbps=1.0, down_mbps=1.0, latency_ms=50.0)
    near = fleet(0.02, 0.02, up_mbps=1000.0, down_mbps=1000.0, latency_ms=0.2)
    spec = answer_keys(parse_spec(STREAMING), near)[0]
    reply = [answer_again(spec, one, ["codec", "delay"], current={}) for one in (near, far)]
    codecs, delays = ([one["answers"][key] for one in reply] for key in ("codec", "delay"))
    assert codecs[0] == "fp32"
    assert codecs[1] in ("feedback(int8:256)", "feedback(int4:256)")
    assert delays[0] < delays[1]
    assert reply[1]["round_s"] > 10 * reply[0]["round_s"]
