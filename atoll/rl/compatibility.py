"""Refuse reinforcement-learning jobs that cannot work, before they are scheduled. No torch.

Every rule reads only the job's tables and names the reason and the nearest combination that works.
Rules about the environments themselves are in :func:`check_tasks`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from atoll.config import JobSpec
from atoll.config.rl_tables import RlTable
from atoll.errors import ConfigError
from atoll.rl.environments.spaces import TaskSpec
from atoll.rl.text.compatibility import check_text
from atoll.strategies import compatibility
from atoll.strategies.resolve import resolve

TEXT = "text:"
"""Prefix of a language model's environment."""

WITHOUT_ENVIRONMENTS = "this job is only the critic of a pool"


def is_text(rl: RlTable) -> bool:
    """Return whether the policies are language models."""
    return bool(rl.policies) and all(policy.env.startswith(TEXT) for policy in rl.policies)


def check(spec: JobSpec) -> None:
    """Refuse tables that cannot work together.

    Raises:
        ConfigError: with the reason and the nearest combination that works.
    """
    for rule in RULES:
        rule(spec)


def check_tasks(rl: RlTable, tasks: Sequence[TaskSpec]) -> None:
    """Refuse environments that do not fit the critic, or each other.

    Raises:
        ConfigError: a joint critic has no joint state, or states of different shapes; policies of
            one task have different observations or actions.
    """
    if rl.critic == "joint":
        _check_joint(tasks)
    first: dict[str, TaskSpec] = {}
    for task in tasks:
        other = first.setdefault(task.task, task)
        if (other.observation, other.actions) != (task.observation, task.actions):
            raise ConfigError(
                f"two policies cannot solve one task in different spaces: {task.task}",
                given=f"{other.policy} sees {other.observation} and does {other.actions.kind} "
                f"{other.actions.sizes}, {task.policy} sees {task.observation} and does "
                f"{task.actions.kind} {task.actions.sizes}",
                expected="equal spaces, or different words for task",
            )


def _check_joint(tasks: Sequence[TaskSpec]) -> None:
    for task in tasks:
        if task.agents < 2:
            raise ConfigError(
                "a joint critic needs environments with several agents",
                given=f"policy {task.policy}: {task.env or task.task} has one",
                expected="a parallel environment, as of PettingZoo",
                remedy='critic = "pooled" sees what each agent sees',
            )
    shapes = {task.policy: (task.state, task.agents) for task in tasks}
    if len(set(shapes.values())) > 1:
        raise ConfigError(
            "a joint critic cannot see joint states of different shapes",
            given="; ".join(f"{n}: state {s}, {a} agents" for n, (s, a) in shapes.items()),
            expected="the same shape and number of agents for every policy",
            remedy='critic = "own" gives each policy its own',
        )


# ------------------------------------------------------------------------------------- rules


def check_program(spec: JobSpec) -> None:
    """Refuse scripts and commands: the roles are built in."""
    if spec.job.script or spec.job.command:
        raise ConfigError(
            "a job with [rl] cannot have a script or command",
            given=f"script = {spec.job.script!r}, command = {spec.job.command!r}",
            expected="neither", remedy="a custom environment is env = 'module:factory', with code",
        )  # fmt: skip
    if spec.job.min_nodes:
        raise ConfigError(
            "the members of a job with [rl] cannot change",
            given=f"nodes = {{min = {spec.job.min_nodes}, ...}}", expected="no nodes at all",
            remedy="more policies join through a second job of the same pool",
        )  # fmt: skip


def check_text_job(spec: JobSpec) -> None:
    """Refuse mixing language models and control: they have different roles."""
    rl = spec.rl
    text = [policy.name for policy in rl.policies if policy.env.startswith(TEXT)]
    if text and not is_text(rl):
        others = [policy.name for policy in rl.policies if policy.name not in text]
        raise ConfigError(
            "language models cannot share a critic with other policies",
            given=f"{text[0]} is text, {others[0]} is not",
            expected="policies of one sort", remedy="two jobs",
        )  # fmt: skip
    if rl.algorithm == "grpo" and not is_text(rl):
        raise ConfigError(
            "grpo compares completions of one prompt, so it is for language models only",
            given=f"env = {rl.policies[0].env!r}" if rl.policies else WITHOUT_ENVIRONMENTS,
            expected='env = "text:TASK"', remedy='algorithm = "ppo"',
        )  # fmt: skip
    if is_text(rl) and rl.algorithm not in ("ppo", "grpo"):
        raise ConfigError(
            f"language models cannot use {rl.algorithm}",
            given=f'algorithm = "{rl.algorithm}"', expected='"ppo" or "grpo"',
            remedy='algorithm = "ppo"',
        )  # fmt: skip
    if is_text(rl):
        check_text(spec)


def check_values(spec: JobSpec) -> None:
    """Refuse critics that the algorithm cannot use; only GRPO works without values."""
    rl = spec.rl
    if rl.critic == "none" and rl.algorithm != "grpo":
        raise ConfigError(
            f"{rl.algorithm} needs values of what it sees",
            given='critic = "none"', expected="a critic", remedy='critic = "own"',
        )  # fmt: skip
    if rl.algorithm == "impala" and rl.critic not in ("pooled", "own"):
        raise ConfigError(
            "the learner of impala corrects everything by V-trace already",
            given=f'critic = "{rl.critic}"', expected='critic = "pooled" or "own"',
            remedy='critic = "pooled"',
        )  # fmt: skip


def check_asking(spec: JobSpec) -> None:
    """Refuse a value service without a separate critic."""
    rl = spec.rl
    if rl.values == "service" and (rl.critic in ("own", "none") or rl.algorithm == "impala"):
        raise ConfigError(
            "there is no critic that answers requests for values",
            given=f'values = "service" with algorithm = "{rl.algorithm}", critic = "{rl.critic}"',
            expected="a pooled critic", remedy='values = "push"',
        )  # fmt: skip


def check_correction(spec: JobSpec) -> None:
    """Refuse importance weighting of policies that never see the same states."""
    rl = spec.rl
    tasks = {policy.name: policy.task_word for policy in rl.policies}
    if rl.critic == "corrected" and len(set(tasks.values())) > 1:
        (one, other) = _two_that_differ(tasks)
        raise ConfigError(
            "a corrected critic needs policies of the same task",
            given=f"{one} solves {tasks[one]}, {other} solves {tasks[other]}",
            expected="the same env and options, or the same word for task",
            remedy='critic = "pooled" keeps the values of different tasks apart',
        )


def check_pool(spec: JobSpec) -> None:
    """Refuse a pool without a pooled critic, or with impala, whose learner owns its policies."""
    rl = spec.rl
    if not rl.host_critic and not rl.pool:
        raise ConfigError(
            "this job has no critic, and names no pool that has one",
            given="host_critic = false without pool", expected='pool = "pool/NAME" besides',
            remedy="host_critic = true",
        )  # fmt: skip
    if rl.pool and (rl.algorithm == "impala" or rl.critic in ("own", "none")):
        raise ConfigError(
            "this job has no critic to share",
            given=f'pool = "{rl.pool}" with algorithm = "{rl.algorithm}", critic = "{rl.critic}"',
            expected="a critic that other jobs can share", remedy='critic = "pooled"',
        )  # fmt: skip


def check_parts(spec: JobSpec) -> None:
    """Refuse empty minibatches: of steps, or of columns for a recurrent policy."""
    rl = spec.rl
    parts, whole = rl.environments, "environments"
    if not rl.recurrent:
        parts, whole = rl.environments * rl.rollout, "environments * rollout"
    if rl.minibatches > parts and not is_text(rl):
        raise ConfigError(
            "there are more minibatches than parts of a rollout",
            given=f"minibatches = {rl.minibatches}, {whole} = {parts}",
            expected=f"at most {parts}", remedy=f"minibatches = {parts}",
        )  # fmt: skip


def check_agreement(spec: JobSpec) -> None:
    """Refuse averaging of policies that solve different tasks."""
    rl = spec.rl
    if spec.alone:
        return
    preset = f'preset = "{spec.strategy.preset}" in [strategy]'
    if rl.algorithm == "impala" or is_text(rl):
        raise ConfigError(
            "these policies cannot use an outer strategy",
            given=f"{preset} with "
            + ("language models" if is_text(rl) else "impala, with one learner for all policies"),
            expected="no strategy", remedy="leave [strategy] out",
        )  # fmt: skip
    tasks = {policy.name: policy.task_word for policy in rl.policies}
    if len(set(tasks.values())) > 1:
        (one, other) = _two_that_differ(tasks)
        raise ConfigError(
            "only policies of the same task can use an outer strategy",
            given=f"{preset}; {one} solves {tasks[one]}, {other} solves {tasks[other]}",
            expected="the same env and options, or the same word for task",
            remedy="leave [strategy] out: different tasks share the pooled critic only"
            + ('; of a3c [strategy] preset = "alone"' if rl.algorithm == "a3c" else ""),
        )
    compatibility.check(
        resolve(spec.strategy), nodes=len(rl.policies), route=spec.job.route, optimizer="adamw"
    )


def _two_that_differ(tasks: dict[str, str]) -> tuple[str, str]:
    one = next(iter(tasks))
    return one, next(name for name in tasks if tasks[name] != tasks[one])


RULES: tuple[Callable[[JobSpec], None], ...] = (
    check_program,
    check_text_job,
    check_values,
    check_asking,
    check_correction,
    check_pool,
    check_parts,
    check_agreement,
)
"""All rules; each raises or returns nothing."""
