"""Check the names and options of a job before it is submitted."""

from __future__ import annotations

from typing import Any

from atoll.config import JobSpec
from atoll.config.rl_tables import names_code
from atoll.config.swarm_tables import SYNC
from atoll.errors import ConfigError, DataError
from atoll.node.imports import load
from atoll.node.machine.probe import torch_version


def check_can_train() -> None:
    """Raise if this machine could not start workers.

    Raises:
        ConfigError: torch is not installed here.
    """
    if not torch_version():
        raise needs_torch("this machine can be a hub, but cannot train")


def needs_torch(what: str = "this command computes with torch") -> ConfigError:
    """Return the error of something that torch is missing for."""
    return ConfigError(
        what,
        given="torch is not installed",
        expected="torch beside atoll",
        remedy="pip install 'atoll[train]'",
    )


def check_names(spec: JobSpec, *, here: bool = False) -> int:
    """Raise for unknown names and options; return the model's number of parameters.

    Checks that need torch run only if torch is installed; the workers repeat all of them. The
    number is 0 if unknown: without torch, for policies, for a script or a command, and for a
    pretrained model that is not on this machine.

    Args:
        spec: The job.
        here: The job runs on this machine alone, so its model must be here.

    Raises:
        ConfigError: a strategy, an option, a codec, a model or an environment is unknown, or they
            cannot work together; the nearest valid choice is named.
        DataError: the job runs here, and its model is not on this machine.
    """
    if spec.kind == "rl":
        _check_policies(spec, here=here)
    if spec.kind != "trainer":
        return 0
    from atoll.strategies.compatibility import check_job

    resolved = check_job(spec)
    if not torch_version():
        return 0
    load("torch")
    import torch

    from atoll.codec.registry import make_codec
    from atoll.models import build_model, is_custom
    from atoll.train.build import check_data
    from atoll.train.optim.lazy_compiler import leave_out_compiler

    leave_out_compiler()
    make_codec(resolved.codec)
    resolved.build()  # options that are out of range are refused here
    check_data(spec)
    if is_custom(spec.model.name):  # the job's own code must not run before it is on a node
        return 0
    try:
        with torch.device("meta"):  # shapes only: costs neither time nor memory
            model = build_model(spec.model.name, **spec.model.options)
    except DataError:  # a pretrained model that other machines may have
        if here:
            raise
        return 0
    _check_cuts(spec, model)
    return sum(parameter.numel() for parameter in model.parameters())


def _check_cuts(spec: JobSpec, model: Any) -> None:
    """Raise ConfigError if the model cannot be cut, or trained in parts, as the job wants it."""
    from atoll.strategies.inner.options import ASYNC, ActivationFormat, InnerOptions
    from atoll.strategies.inner.pipeline.checks import check_pipeline
    from atoll.strategies.inner.pipeline.lookahead import check_lookahead
    from atoll.strategies.inner.pipeline.stages import chain_of
    from atoll.strategies.inner.pipeline.subspace import check_confined
    from atoll.strategies.inner.swarm.activations import ActivationCodec
    from atoll.strategies.inner.swarm.stage import StageCut, cuts_of
    from atoll.train.optim.optimizers import build_optimizer

    if spec.swarm.stages:
        ActivationCodec(spec.swarm.codec)
        size = ActivationFormat.of(spec.swarm.codec).size
        if size:
            check_confined(model, size)
        if spec.swarm.early_microbatches:
            check_lookahead(build_optimizer(model, spec.train), instead=SYNC)
    if spec.dipaco.modules and chain_of(model)[1]:  # a guess at the order is checked by members
        cuts_of(model, StageCut(stages=len(spec.dipaco.modules), parts="levels"))
    options = InnerOptions.of(spec)
    if options.shape.pipeline > 1 and not spec.island.elastic:
        check_pipeline(model, options)
        if options.schedule == ASYNC:
            check_lookahead(build_optimizer(model, spec.train))


def _check_policies(spec: JobSpec, *, here: bool) -> None:
    """Raise for policies that cannot learn together; creates their environments once.

    Environments in the job's own code are left to the workers: that code must not run before.
    """
    from atoll.rl.compatibility import check, check_tasks, is_text

    check(spec)
    if is_text(spec.rl) or not here or not torch_version():
        return
    from atoll.rl.environments.environment import make_environment, task_of

    tasks = []
    for policy in spec.rl.policies:
        if names_code(policy.env):
            continue
        environment = make_environment(policy)
        tasks.append(task_of(policy, spec.rl, environment))
        environment.close()
    check_tasks(spec.rl, tasks)
