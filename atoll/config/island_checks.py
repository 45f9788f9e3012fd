"""Validation of `[island]` before anything starts."""

from __future__ import annotations

from atoll.config.tables import JobSpec
from atoll.errors import ConfigError


def check_encryption(spec: JobSpec) -> None:
    """Raise ConfigError if a new job would send something in the clear that is not allowed."""
    machines = spec.island.machines
    if machines > 1 and spec.island.encryption == "on":
        raise ConfigError(
            "what the ranks of an island send from machine to machine cannot be encrypted",
            given=f"machines = {machines}, collectives of NCCL, of Gloo and torch's own store",
            expected="one machine, or a network between its machines that you trust",
            remedy='set encryption = "off" in [island] (parameters, gradients and rows of a batch '
            "then cross that network in the clear), or machines = 1 and an outer method between",
        )


def not_encrypted(spec: JobSpec) -> str:
    """Return what a job sends in the clear by its own settings, for people; empty: nothing."""
    plain = []
    if spec.job.encryption == "off":
        plain.append("what members send each other directly (encryption in [job])")
    if spec.island.machines > 1:
        plain.append("what the ranks of an island exchange between machines ([island])")
    return f"not encrypted: {', and '.join(plain)}" if plain else ""


def check_island(spec: JobSpec) -> None:
    """Check that an island can be started; raises ConfigError."""
    ranks = spec.mesh.ranks  # raises if the numbers are inconsistent
    machines = spec.island.machines
    if machines < 1 or ranks % machines or (machines > 1 and ranks < machines):
        nearest = max(1, round(ranks / max(1, machines))) * max(1, machines)
        raise ConfigError(
            "the ranks of an island cannot be split over its machines",
            given=f"{ranks} ranks ({spec.mesh}), machines = {machines} in [island]",
            expected="equally many ranks on every machine, at least one",
            remedy=f"take {nearest} ranks, or a number of machines that divides {ranks}",
        )
    if machines > 1 and spec.launch.launcher == "container" and spec.launch.network != "host":
        raise ConfigError(
            "the machines of an island connect directly to each other",
            given=f"network = {spec.launch.network!r} in [launch], machines = {machines}",
            expected='network = "host"',
            remedy='set network = "host" in [launch], or machines = 1',
        )
    if spec.job.script and (spec.strategy.inner == "pipeline" or spec.mesh.pipeline > 1):
        raise ConfigError(
            "a script's model cannot be cut into a pipeline",
            given=f"mesh {spec.mesh}, with a script in [job]",
            expected="the built-in trainer, which divides models into stages",
            remedy='name = "module:factory" in [model] lets it train a model of your own; or use '
            '"ddp", "fsdp", "tensor" or "hybrid", in which the script divides its model',
        )
    if spec.island.elastic:
        _check_elastic(spec)
    if ranks > 1 and (spec.rl.active or spec.job.command):
        what = "policies learn" if spec.rl.active else "a command runs"
        raise ConfigError(
            f"{what} in one process per member",
            given=f"an island of {ranks} ranks ({spec.mesh})",
            expected="the built-in trainer, or a script in [job]",
            remedy="leave out [island] and inner in [strategy]",
        )


def _check_elastic(spec: JobSpec) -> None:
    chosen = {name: getattr(spec.island, name) for name in ("mesh", "cuts", "microbatches")}
    fixed = [name for name, value in chosen.items() if value]
    if spec.strategy.inner != "pipeline" or fixed:
        listed = ", ".join(f"{name} = {chosen[name]}" for name in fixed)
        raise ConfigError(
            "elastic = true chooses stages, replicas, cuts and microbatches by itself",
            given=f"inner = {spec.strategy.inner!r} in [strategy]"
            + (f", {listed}" if listed else ""),
            expected='inner = "pipeline", and the number of ranks in [island]',
            remedy=f"leave out {' and '.join(fixed)} in [island]"
            if fixed
            else 'inner = "pipeline" in [strategy], or elastic = false',
        )
    if spec.island.schedule == "async":
        raise ConfigError(
            "elastic = true chooses replicas of a pipeline, which an asynchronous one cannot have",
            given='schedule = "async" in [island]',
            expected='"1f1b" or "gpipe"',
            remedy="elastic = false; or leave out schedule",
        )
