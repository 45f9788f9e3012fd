"""Keys of a job that are left to the planner. Loads no torch.

`every`, `delay` and `codec` may be `auto` in `[strategy]`. The method, and what the file says
besides, stay; `--plan auto` replaces the method too. A collective that is left open is then chosen
as well; else `auto` is the ring. A codec `auto` (codec/wrappers/auto.py), and a delay `auto` of
methods that take it, follow measured rounds while the job runs: the planner says with what they
begin, `auto:int8` or `auto:3`, and what they take when machines or lines have changed.
"""

from __future__ import annotations

import dataclasses

from atoll.config import JobSpec
from atoll.errors import ConfigError
from atoll.strategies.resolve import resolve

AUTO = "auto"
OPTIONS = ("every", "delay")


def open_keys(spec: JobSpec) -> tuple[str, ...]:
    """Return the keys of `[strategy]` that are `auto`."""
    found = [name for name in OPTIONS if spec.strategy.options.get(name) == AUTO]
    return (*found, *(("codec",) if codec_is_open(spec.strategy.codec) else ()))


def codec_is_open(codec: str) -> bool:
    """Return whether a codec is `auto` without one that it begins with, perhaps with feedback."""
    inner = codec.removeprefix("feedback(")
    return inner.startswith(AUTO) and not inner.startswith(f"{AUTO}:")


def begin_with(codec: str, first: str) -> str:
    """Return a codec `auto` that begins with one of its own."""
    plain = first.removeprefix("feedback(").removesuffix(")")
    head, _, rest = codec.partition(AUTO)
    return f"{head}{AUTO}:{plain}{rest}"


def adapts_delay(spec: JobSpec) -> bool:
    """Return whether the method takes a delay `auto`, which then follows measured rounds."""
    try:
        resolve(dataclasses.replace(spec.strategy, options={"delay": AUTO}))
    except ConfigError:
        return False
    return True


def without_auto(spec: JobSpec) -> JobSpec:
    """Return the job with open options left out, so that its method's defaults stand there.

    What follows measured rounds stays: `codec`, and `delay` of methods that adapt it.
    """
    keys = [key for key in open_keys(spec) if key != "delay" or not adapts_delay(spec)]
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
