"""Keys of a job that are left to the planner. Loads no torch.

`every`, and `delay` of methods that do not adapt it themselves, may be `auto` in `[strategy]`. The
method, and what the file says besides, stay; `--plan auto` replaces the method too. A collective
that is left open is then chosen as well; else `auto` is the ring. A codec `auto`
(codec/wrappers/auto.py), and a delay `auto` of methods that take it, are answered while the job
runs, by measured rounds.
"""

from __future__ import annotations

import dataclasses

from atoll.config import JobSpec
from atoll.errors import ConfigError
from atoll.strategies.resolve import resolve

AUTO = "auto"
OPTIONS = ("every", "delay")


def open_keys(spec: JobSpec) -> tuple[str, ...]:
    """Return the options of `[strategy]` that are `auto` although the method takes no `auto`."""
    found = []
    for name in OPTIONS:
        if spec.strategy.options.get(name) != AUTO:
            continue
        only = dataclasses.replace(spec.strategy, options={name: AUTO})
        try:
            resolve(only)
        except ConfigError:
            found.append(name)
    return tuple(found)


def without_auto(spec: JobSpec) -> JobSpec:
    """Return the job with open options left out, so that its method's defaults stand there."""
    keys = open_keys(spec)
    options = {name: value for name, value in spec.strategy.options.items() if name not in keys}
    return dataclasses.replace(spec, strategy=dataclasses.replace(spec.strategy, options=options))


def is_open(spec: JobSpec, *, plan: str) -> bool:
    """Return whether a planner is needed.

    Raises:
        ConfigError: `plan` is an unknown word.
    """
    if plan not in ("", AUTO):
        raise ConfigError(
            "this plan is not known", given=repr(plan), expected="--plan auto",
            remedy="atoll plan job.toml shows what it would choose",
        )  # fmt: skip
    return bool(plan) or bool(open_keys(spec))
