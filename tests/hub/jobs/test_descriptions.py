"""What people see of jobs whose members have different things to do."""

from __future__ import annotations

from atoll.config import parse_spec
from atoll.hub.jobs.descriptions import describe_island, describe_method
from atoll.hub.jobs.record import Job, job_facts, policy_steps, steps_of

SPEC = """
[job]
name = "x"
[rl]
steps = 1000
algorithm = "impala"
[[rl.policies]]
name = "quick"
env = "CartPole-v1"
actors = 2
[[rl.policies]]
name = "slow"
env = "Pendulum-v1"
steps = 3000
"""


def job() -> Job:
    return Job(job="x-1", created=0.0, spec=parse_spec(SPEC))


def test_every_slot_is_told_what_it_does() -> None:
    roles = job_facts(job())["roles"]
    assert [(role["role"], role["policy"]) for role in roles] == [
        ("learner", ""), ("actor", "quick"), ("actor", "quick"), ("actor", "slow"),
    ]  # fmt: skip
    assert roles[3] == {"role": "actor", "policy": "slow", "env": "Pendulum-v1", "steps": 3000}
    assert job_facts(Job(job="y-1", created=0.0))["roles"] == []


def test_a_job_of_policies_is_as_far_as_all_of_them_together() -> None:
    one = job()
    assert steps_of(one.spec) == 3000  # the most of one policy
    assert policy_steps(one, {}) == 0
    # 500 + 250 of 1000 and 1250 of 3000 are half of all; the learner's own steps do not count.
    assert policy_steps(one, {0: 99, 1: 500, 2: 250, 3: 1250}) == 1500
    # More than wanted counts as all of it, and makes up for no other.
    assert policy_steps(one, {1: 9000, 2: 9000, 3: 0}) == 750
    assert policy_steps(one, {1: 500, 2: 500, 3: 3000}) == 3000


def test_members_of_several_ranks_tell_how_they_lie() -> None:
    island = 'inner = "hybrid"\n[island]\nmesh = {replicate = 2, tensor = 2}'
    assert describe_island(parse_spec(f"[strategy]\n{island}")) == "replicate=2 tensor=2"
    assert describe_island(parse_spec("")) == ""
    one = Job(job="x-1", created=0.0, spec=parse_spec(f"[strategy]\n{island}"))
    assert job_facts(one)["island"] == "replicate=2 tensor=2"


def test_other_jobs_have_the_steps_of_their_file() -> None:
    assert steps_of(parse_spec("[train]\nsteps = 7")) == 7
    assert steps_of(parse_spec('[job]\ncommand = ["true"]')) == 0


def test_a_script_has_a_total_only_if_it_is_declared() -> None:
    script = '[job]\nscript = "train.py"\n'
    assert steps_of(parse_spec(script)) == 0
    assert steps_of(parse_spec(f"{script}[train]\nsteps = 200")) == 200


def test_method_is_told_in_the_words_that_people_use() -> None:
    own = '[strategy]\npreset = "diloco"\nevery = 25\ncodec = "feedback(int8)"'
    assert describe_method(parse_spec(own)) == "diloco int8 every 25"
    assert describe_method(parse_spec('[job]\nscript = "train.py"')) == ""  # it says so itself
