"""Jobs of reinforcement learning that cannot work are refused, with the nearest that does."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from atoll.cli.jobs.precheck import check_names
from atoll.config import dump_spec, parse_spec, read_spec
from atoll.errors import ConfigError
from atoll.rl.compatibility import check, check_tasks
from atoll.rl.environments.spaces import Actions, TaskSpec

CART = "CartPole-v1"
ONE = ({"name": "one", "env": CART},)
SAME = (*ONE, {"name": "two", "env": CART})
OTHER = (*ONE, {"name": "two", "env": CART, "options": {"sutton_barto_reward": True}})


def refusal(
    policies: tuple[dict[str, Any], ...] = ONE, tables: dict[str, Any] | None = None, **rl: Any
) -> ConfigError:
    spec = read_spec({**(tables or {}), "rl": {**rl, "policies": list(policies)}})
    with pytest.raises(ConfigError) as caught:
        check(spec)
    assert caught.value.given is not None
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize("critic", ["pooled", "unconditioned", "corrected", "own"])
@pytest.mark.parametrize("algorithm", ["ppo", "impala", "a3c"])
def test_what_the_documents_offer_is_let_through(algorithm: str, critic: str) -> None:
    if algorithm == "impala" and critic not in ("pooled", "own"):
        assert "corrects everything" in refusal(SAME, algorithm=algorithm, critic=critic).what
        return
    spec = read_spec({"rl": {"algorithm": algorithm, "critic": critic, "policies": list(SAME)}})
    check(spec)
    check(parse_spec(dump_spec(spec)))


@pytest.mark.parametrize(
    ("rl", "what", "remedy"),
    [
        ({"critic": "none"}, "ppo needs values", 'critic = "own"'),
        ({"algorithm": "grpo"}, "is for language models only", 'algorithm = "ppo"'),
        ({"values": "service", "critic": "own"}, "no critic that answers", 'values = "push"'),
        ({"host_critic": False}, "names no pool", "host_critic = true"),
        ({"pool": "pool/x", "critic": "own"}, "no critic to share", 'critic = "pooled"'),
        ({"minibatches": 4096}, "more minibatches", "minibatches = 512"),
        ({"minibatches": 9, "recurrent": 4}, "more minibatches", "minibatches = 8"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_settings_that_contradict_each_other(rl: dict[str, Any], what: str, remedy: str) -> None:
    error = refusal(**rl)
    assert what in error.what
    assert error.remedy == remedy


def test_policies_of_different_tasks_are_not_averaged() -> None:
    error = refusal(OTHER, {"strategy": {"preset": "diloco"}})
    assert "same task can use" in error.what
    assert "two solves CartPole-v1 {" in str(error.given)
    assert "same task" in refusal(OTHER, critic="corrected").what
    assert "same task can use" in refusal(OTHER, algorithm="a3c").what
    named = tuple({**policy, "task": "cart"} for policy in OTHER)
    check(read_spec({"strategy": {}, "rl": {"policies": list(named)}}))


def test_policies_agree_only_where_the_file_says_so() -> None:
    tables: dict[str, Any] = {"rl": {"policies": list(SAME)}}
    assert read_spec(tables).alone
    assert parse_spec(dump_spec(read_spec(tables))).alone
    assert read_spec({**tables, "strategy": {}}).strategy.preset == "diloco"
    a3c = {"rl": {"algorithm": "a3c", "policies": list(SAME)}}
    assert read_spec(a3c).strategy.preset == "async-sgd"


def test_a_strategy_that_cannot_work_is_refused_as_anywhere_else() -> None:
    strategy = {"preset": "diloco", "aggregate": "sum"}
    assert "multiplies the step" in refusal(SAME, {"strategy": strategy}).what
    assert "one learner for all policies" in str(
        refusal(SAME, {"strategy": {}}, algorithm="impala").given
    )  # fmt: skip


def test_policy_job_has_no_script_and_no_member_bounds() -> None:
    assert "cannot have a script" in refusal(tables={"job": {"script": "x.py"}}).what
    bounds = {"nodes": {"min": 1, "max": 2}}
    assert "cannot change" in refusal(tables={"job": bounds}).what


def test_text_and_control_do_not_mix() -> None:
    text = {"name": "words", "env": "text:brackets"}
    assert "cannot share a critic" in refusal((*ONE, text)).what
    assert "cannot use impala" in refusal((text,), algorithm="impala").what


TASK = TaskSpec(
    policy="one", task="x", observation=(4,), actions=Actions(kind="discrete", sizes=(2,)),
    gamma=0.99, state=(8,), agents=2, env="a:b",
)  # fmt: skip


def test_a_joint_critic_needs_joint_states_of_one_shape() -> None:
    rl = read_spec({"rl": {"critic": "joint", "policies": list(ONE)}}).rl
    other = dataclasses.replace(TASK, policy="two", task="y", state=(12,), agents=3)
    check_tasks(rl, [TASK, dataclasses.replace(TASK, policy="two")])
    with pytest.raises(ConfigError, match=r"one: state \(8,\), 2 agents; two: state \(12,\), 3"):
        check_tasks(rl, [TASK, other])
    with pytest.raises(ConfigError, match="environments with several agents"):
        check_tasks(rl, [dataclasses.replace(TASK, agents=1)])


def test_policies_of_one_task_have_equal_spaces() -> None:
    rl = read_spec({"rl": {"policies": list(ONE)}}).rl
    wider = dataclasses.replace(TASK, policy="two", observation=(6,))
    with pytest.raises(ConfigError, match=r"one sees \(4,\).*two sees \(6,\)"):
        check_tasks(rl, [TASK, wider])


def test_local_environments_are_made_before_the_start() -> None:
    known = read_spec({"rl": {"policies": list(ONE)}})
    assert check_names(known, here=True) == 0
    unknown = read_spec({"rl": {"policies": [{"name": "one", "env": "Nothing-v0"}]}})
    with pytest.raises(ConfigError, match="the environment of policy one cannot be made"):
        check_names(unknown, here=True)
    check_names(unknown)  # other machines may have what this one lacks
    elsewhere = read_spec({"rl": {"policies": [{"name": "one", "env": "their.code:make"}]}})
    check_names(elsewhere, here=True)  # the job's own code runs at its workers only
    many = read_spec({"rl": {"critic": "joint", "policies": list(ONE)}})
    with pytest.raises(ConfigError, match="environments with several agents"):
        check_names(many, here=True)
