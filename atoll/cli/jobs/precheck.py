"""Finds wrong names in a job before anything is started for it."""

from __future__ import annotations

from atoll.config import JobSpec
from atoll.errors import ConfigError, DataError
from atoll.node.imports import load
from atoll.node.machine.probe import torch_version

OUR_OWN = "atoll."
"""Start of the modules whose environments come with Atoll."""


def check_can_train() -> None:
    """Refuse to make this machine a node when its workers could not start.

    Raises:
        ConfigError: torch is not installed here.
    """
    if not torch_version():
        raise ConfigError(
            "this machine can be a hub, but cannot train",
            given="torch is not installed",
            expected="torch beside atoll",
            remedy="pip install 'atoll[train]'",
        )


def check_names(spec: JobSpec, *, here: bool = False) -> int:
    """Refuse names and options that no machine will know; return the parameters of the model.

    What needs torch is checked only where torch is installed; the workers check all of it again.
    The number is 0 where it cannot be known: without torch, for policies, for a program of
    somebody's own, or for a pretrained model that is not on this machine.

    Args:
        spec: The job.
        here: It runs on this machine alone, so what it needs has to be here.

    Raises:
        ConfigError: a strategy, an option, a codec, a model or an environment is unknown, or they
            cannot work together; the nearest that works is named.
        DataError: the job runs here, and the model that it names is not here.
    """
    if spec.kind == "rl":
        _check_policies(spec, here=here)
    if spec.kind != "trainer":
        return 0
    from atoll.strategies.compatibility import check
    from atoll.strategies.registry import build_outer, resolve

    resolved, job = resolve(spec.strategy), spec.job
    check(
        resolved, nodes=job.nodes, min_nodes=job.min_nodes, route=job.route,
        optimizer=spec.train.optimizer,
    )  # fmt: skip
    if not torch_version():
        return 0
    load("torch")
    import torch

    from atoll.codec.registry import make_codec
    from atoll.models import build_model
    from atoll.train.build import check_data
    from atoll.train.optim.lazy_compiler import leave_out_compiler

    leave_out_compiler()
    make_codec(resolved.codec)
    build_outer(resolved)
    check_data(spec)
    try:
        with torch.device("meta"):  # shapes only: costs neither time nor memory
            model = build_model(spec.model.name, **spec.model.options)
    except DataError:  # a pretrained model that other machines may have
        if here:
            raise
        return 0
    return sum(parameter.numel() for parameter in model.parameters())


def _check_policies(spec: JobSpec, *, here: bool) -> None:
    """Refuse policies that cannot learn together; make their environments where they will live.

    Those of the job's own code are made by the workers alone: its code does not run before that.
    """
    from atoll.rl.compatibility import check, check_tasks, is_text

    check(spec)
    if is_text(spec.rl) or not here or not torch_version():
        return
    from atoll.rl.environments.environment import make_environment, task_of

    tasks = []
    for policy in spec.rl.policies:
        if ":" in policy.env and not policy.env.startswith(OUR_OWN):
            continue
        environment = make_environment(policy)
        tasks.append(task_of(policy, spec.rl, environment))
        environment.close()
    check_tasks(spec.rl, tasks)
