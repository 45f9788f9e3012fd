"""Validation of `[rl]`, and the number of members that it implies."""

from __future__ import annotations

import dataclasses
from collections import Counter

from atoll.config.rl_tables import RlTable
from atoll.config.tables import JobSpec
from atoll.errors import ConfigError
from atoll.ids import check_name


def with_members(spec: JobSpec, *, nodes_set: bool) -> JobSpec:
    """Return the job with as many members as its policies need; `nodes_set`: the file sets `nodes`.

    Raises ConfigError if `[rl]` is invalid.
    """
    rl = spec.rl
    _check_names(rl)
    _check_together(rl)
    if nodes_set and spec.job.nodes != rl.members:
        raise ConfigError(
            "nodes in [job] does not fit [rl]",
            given=f"nodes = {spec.job.nodes}",
            expected=f"{rl.members}: one for each actor and sampler"
            + (", one for the critic" if rl.has_critic else ""),
            remedy=f"leave nodes out; on this machine alone: --local {rl.members}",
        )
    queues = [*spec.job.queues, *([rl.pool] if rl.pool and rl.pool not in spec.job.queues else [])]
    job = dataclasses.replace(spec.job, nodes=rl.members, queues=queues)
    return dataclasses.replace(spec, job=job)


def with_own_agreement(spec: JobSpec) -> JobSpec:
    """Return a job without `[strategy]` in its file with the algorithm's preset."""
    preset = "async-sgd" if spec.rl.algorithm == "a3c" else "alone"
    return dataclasses.replace(spec, strategy=dataclasses.replace(spec.strategy, preset=preset))


def _check_names(rl: RlTable) -> None:
    if not rl.policies and not (rl.pool and rl.has_critic):
        raise ConfigError(
            "[rl] needs policies", given="none", expected="a [[rl.policies]] for each policy",
            remedy="a job that is only the critic of a pool names the pool",
        )  # fmt: skip
    for policy in rl.policies:
        check_name("name of a policy", policy.name)
        if not policy.env:
            raise ConfigError(
                "a policy needs an environment", given=f"{policy.name}: no env",
                expected='env = "CartPole-v1", for instance',
            )  # fmt: skip
    if rl.pool:
        _check_pool(rl.pool)
    twice = [name for name, count in Counter(p.name for p in rl.policies).items() if count > 1]
    if twice:
        raise ConfigError("two policies have one name", given=twice[0], expected="different names")


def _check_pool(pool: str) -> None:
    first, slash, rest = pool.partition("/")
    if not slash or first == "node":
        raise ConfigError(
            "this cannot be the name of a pool", given=repr(pool), expected="e.g. pool/balance",
            remedy="a name with a slash that does not begin with node/",
        )  # fmt: skip
    for part in (first, *rest.split("/")):
        check_name("name of a pool", part)


def _check_together(rl: RlTable) -> None:
    if rl.c_clip > rl.rho_clip:
        raise ConfigError(
            "the clips of V-trace are out of range",
            given=f"c_clip = {rl.c_clip}, rho_clip = {rl.rho_clip}",
            expected="c_clip of at most rho_clip",
        )
    for policy in rl.policies:
        if policy.samplers and not policy.env.startswith("text:"):
            raise ConfigError(
                "samplers write completions of language models",
                given=f"samplers = {policy.samplers}, env = {policy.env!r}",
                expected='env = "text:TASK", or samplers = 0',
                remedy='several actors of one policy: actors, with algorithm = "impala"',
            )
    if rl.algorithm != "impala" and any(policy.actors > 1 for policy in rl.policies):
        raise ConfigError(
            "several actors of one policy need a learner",
            given=f'algorithm = "{rl.algorithm}"',
            expected='algorithm = "impala"',
            remedy="or give each actor its own policy and combine them with [strategy]",
        )
