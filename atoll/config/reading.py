"""Reads job files: TOML to frozen dataclasses, every mistake named."""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from atoll.config.island_checks import check_island
from atoll.config.reading_rl import with_members, with_own_agreement
from atoll.config.tables import JobSpec, LaunchTable
from atoll.config.train_checks import check_train
from atoll.errors import ConfigError, unknown
from atoll.ids import check_name

T = TypeVar("T")

ROUTES = ("auto", "direct", "relay")
PACES = ("measured", "equal")
OPTIMIZERS = ("adamw", "sgd", "muon")
TORCH_OPTIMIZER = "torch:"
"""Before the name of an optimizer of torch's own."""
LAUNCHERS = ("process", "container")
PRECISIONS = ("fp32", "bf16", "fp16")
DEVICES = ("auto", "cpu", "cuda")
SCHEDULES = ("gpipe", "1f1b", "interleaved")
ON_LOSS = ("wait", "shrink")
PULLS = ("missing", "always", "never")
NETWORKS = ("host", "bridge", "none")
OPEN_TABLES = ("model", "strategy")
"""Tables whose further keys are options of the component they name."""


def read_table(cls: type[T], mapping: Mapping[str, Any], *, where: str) -> T:
    """Return the frozen dataclass `cls` filled from a TOML table.

    Args:
        cls: Any dataclass whose fields are str, int, float, bool or list of those.
        mapping: Names and values as parsed.
        where: How the table is called in messages, e.g. ``"[train]"``.

    Raises:
        ConfigError: a key is unknown (the nearest known one is named) or a value has a wrong type.
    """
    hints = typing.get_type_hints(cls)
    known = {field.name for field in dataclasses.fields(typing.cast(Any, cls))}
    values: dict[str, Any] = {}
    for key, value in mapping.items():
        if key not in known:
            raise unknown(f"key in {where}", key, known)
        values[key] = _checked(value, hints[key], f"{key} in {where}")
    return cls(**values)


def _checked(value: Any, hint: Any, name: str) -> Any:
    """Return the value if its type fits the hint; whole numbers serve as floats."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
        origin = typing.get_origin(hint)
    if origin is list:
        (inner,) = typing.get_args(hint)
        if isinstance(value, list):
            if dataclasses.is_dataclass(inner):
                return [read_table(typing.cast(Any, inner), item, where=name) for item in value]
            return [_checked(item, inner, name) for item in value]
    elif origin is Mapping and not isinstance(value, Mapping):
        raise ConfigError(f"{name} has the wrong type", given=repr(value), expected="a table")
    elif origin is not None or hint is Any:
        return value
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise ConfigError(
        f"{name} has the wrong type",
        given=repr(value),
        expected="a list" if origin is list else getattr(hint, "__name__", str(hint)),
    )


def read_spec(tables: Mapping[str, Any]) -> JobSpec:
    """Return the job that parsed TOML describes.

    Raises:
        ConfigError: a table, key or value is wrong.
    """
    known = {field.name: field for field in dataclasses.fields(JobSpec)}
    hints = typing.get_type_hints(JobSpec)
    values: dict[str, Any] = {}
    for name, table in tables.items():
        if name not in known:
            raise unknown("table in the job file", name, known)
        if not isinstance(table, Mapping):
            raise ConfigError(f"{name} must be a table", given=repr(table), expected=f"[{name}]")
        cls = hints[name]
        if name == "job":
            table = _with_bounds(table)
        if name in OPEN_TABLES:
            own = {field.name for field in dataclasses.fields(cls)} - {"options"}
            options = {key: value for key, value in table.items() if key not in own}
            part = read_table(
                cls, {key: table[key] for key in table if key in own}, where=f"[{name}]"
            )
            values[name] = dataclasses.replace(part, options=options)
        else:
            values[name] = read_table(cls, table, where=f"[{name}]")
    spec = JobSpec(**values)
    if "rl" in tables:
        spec = with_members(spec, given="nodes" in tables.get("job", {}))
        if "strategy" not in tables:
            spec = with_own_agreement(spec)
    _check_ranges(spec)
    return spec


def _with_bounds(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `[job]` with `nodes = {min, max}` as the two numbers it stands for.

    Raises:
        ConfigError: there are other keys, or no `max`.
    """
    nodes = table.get("nodes")
    if not isinstance(nodes, Mapping):
        return table
    for key in nodes:
        if key not in ("min", "max"):
            raise unknown("key in nodes of [job]", key, ("min", "max"))
    if "max" not in nodes:
        raise ConfigError("nodes in [job] needs max", given=str(dict(nodes)), expected="{min, max}")
    return {**table, "nodes": nodes["max"], "min_nodes": nodes.get("min", 1)}


def _check_ranges(spec: JobSpec) -> None:
    """Refuse numbers that cannot work, each by its name."""
    check_name("job name", spec.job.name)
    choices = {
        "route": (spec.job.route, ROUTES),
        "pace": (spec.train.pace, PACES),
        "precision": (spec.train.precision, PRECISIONS),
        "device": (spec.island.device, DEVICES),
        "schedule": (spec.island.schedule, SCHEDULES),
        "on_loss": (spec.island.on_loss, ON_LOSS),
        "launcher": (spec.launch.launcher, LAUNCHERS),
        "pull": (spec.launch.pull, PULLS),
        "network": (spec.launch.network, NETWORKS),
    }
    for name, (given, known) in choices.items():
        _check_choice(name, given, known)
    positive = {
        "nodes in [job]": spec.job.nodes,
        "steps in [train]": spec.train.steps,
        "batch in [train]": spec.train.batch,
        "lr in [train]": spec.train.lr,
        "keep in [checkpoint]": spec.checkpoint.keep,
        "accumulate in [train]": spec.train.accumulate,
        "machines in [island]": spec.island.machines,
        "chunks in [island]": spec.island.chunks,
        "timeout_s in [island]": spec.island.timeout_s,
    }
    for name, value in positive.items():
        if not value > 0:
            raise ConfigError(f"{name} is too small", given=value, expected="more than 0")
    check_island(spec)
    check_train(spec)
    if not 0 <= spec.job.min_nodes <= spec.job.nodes:
        raise ConfigError(
            "min_nodes in [job] is out of range",
            given=spec.job.min_nodes,
            expected=f"a number from 0 to nodes, which is {spec.job.nodes}",
        )
    if not spec.train.optimizer.startswith(TORCH_OPTIMIZER):
        _check_choice("optimizer", spec.train.optimizer, (*OPTIMIZERS, "torch:NAME"))
    _check_program(spec)
    if not 0 < spec.data.held_out < 0.9:
        raise ConfigError(
            "held_out in [data] is out of range",
            given=spec.data.held_out,
            expected="a share between 0 and 0.9",
        )


def _check_choice(name: str, given: str, known: Sequence[str]) -> None:
    if given not in known:
        raise unknown(name, given, known)


def _check_program(spec: JobSpec) -> None:
    """Refuse needs below zero and programs that contradict each other."""
    for field in dataclasses.fields(spec.needs):
        value = getattr(spec.needs, field.name)
        if isinstance(value, float) and not 0 <= value < float("inf"):
            raise ConfigError(f"{field.name} in [needs] must not be negative", given=value)
    if spec.job.retries < 0:
        raise ConfigError("retries in [job] must not be negative", given=spec.job.retries)
    if spec.job.script and spec.job.command:
        raise ConfigError(
            "a job runs one program",
            given=f"script = {spec.job.script!r} and command = {spec.job.command!r}",
            expected="script or command in [job]",
        )
    if spec.job.requirements and not spec.job.code:
        raise ConfigError(
            "requirements in [job] are a file of its code",
            given=f"requirements = {spec.job.requirements!r} without code",
            expected='code = "FOLDER" in [job] besides',
        )
    _check_launch(spec.launch)


def _check_launch(launch: LaunchTable) -> None:
    """Refuse ways to start a process that contradict themselves."""
    if (launch.launcher == "container") != bool(launch.image):
        raise ConfigError(
            "image and launcher in [launch] do not fit together",
            given=f"launcher = {launch.launcher!r}, image = {launch.image!r}",
            expected='launcher = "container" and an image, or neither',
        )
    for line in launch.env:
        name, equals, _ = line.partition("=")
        if not (name and equals) or name.upper().startswith("ATOLL_"):
            raise ConfigError(
                "this line of env in [launch] cannot be set",
                given=repr(line),
                expected="NAME=VALUE, where NAME does not begin with ATOLL_",
            )
    for name in ("mounts", "read_only", "signature"):
        if launch.launcher == "process" and getattr(launch, name):
            raise ConfigError(
                f"{name} in [launch] is for containers only",
                given=f"{name} = {getattr(launch, name)!r}",
                expected='launcher = "container" and an image',
            )


def parse_spec(text: str, *, name: str = "the job file") -> JobSpec:
    """Return the job that TOML text describes.

    Raises:
        ConfigError: it is not TOML, or a table, key or value is wrong.
    """
    try:
        return read_spec(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} is not valid TOML", given=str(error)) from error


def load_spec(path: Path) -> JobSpec:
    """Return the job in a TOML file.

    Raises:
        ConfigError: there is no such file, or it is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "the job file cannot be read",
            given=f"{path} ({error})",
            expected="a TOML file; examples are in examples/",
        ) from error
    return parse_spec(text, name=str(path))
