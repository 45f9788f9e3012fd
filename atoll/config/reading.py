"""Reads job files from TOML into frozen dataclasses, with precise errors."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from atoll.config.constraints import CHOICES, EXPECTED
from atoll.config.dipaco_tables import check_paths, with_paths
from atoll.config.environment import WorkerEnvironment
from atoll.config.island_checks import check_island
from atoll.config.log_table import check_log, with_log
from atoll.config.reading_rl import with_members, with_own_agreement
from atoll.config.redaction import SECRET
from atoll.config.swarm_tables import (
    check_swarm,
    check_whole,
    largest_member,
    member_spec,
    with_swarm,
)
from atoll.config.tables import CheckpointTable, JobSpec, LaunchTable
from atoll.config.train_checks import check_train
from atoll.config.tune_tables import check_tune, with_tune
from atoll.errors import ConfigError, unknown
from atoll.ids import check_name

T = TypeVar("T")
Table = Mapping[str, Any]

OPTIMIZERS = ("adamw", "sgd", "muon")
TORCH_OPTIMIZER = "torch:"
"""Prefix of torch's own optimizers."""
OPEN_TABLES = ("model", "strategy")
"""Tables with further keys that are options of the named component."""


def read_table(cls: type[T], mapping: Mapping[str, Any], *, where: str) -> T:
    """Fill the frozen dataclass `cls` from a TOML table.

    Args:
        cls: Any dataclass that msgspec converts, with `Annotated` constraints.
        mapping: The parsed table.
        where: Name of the table in messages, e.g. ``"[train]"``.

    Raises:
        ConfigError: a key is unknown (suggests the nearest), or a value has a wrong type or range.
    """
    hints = _hints_of(typing.cast(Any, cls))
    values: dict[str, Any] = {}
    for key, value in mapping.items():
        if key not in hints:
            raise unknown(f"key in {where}", key, hints)
        values[key] = _converted(value, hints[key], f"{key} in {where}")
    return cls(**values)


@functools.cache
def _hints_of(cls: type[Any]) -> dict[str, Any]:
    """Cached, because resolving annotations takes most of the time of reading."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _converted(value: Any, hint: Any, name: str) -> Any:
    """Return the value if it fits the annotation; integers may replace floats."""
    numbers = value if isinstance(value, list) else [value]
    if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
        raise ConfigError(f"{name} must be finite", given=value, expected="a number")
    inner = next(iter(typing.get_args(hint)), None) if typing.get_origin(hint) is list else None
    if isinstance(value, list) and dataclasses.is_dataclass(inner):
        table = typing.cast(type[Any], inner)
        return [read_table(table, _converted(one, Table, name), where=name) for one in value]
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        raise _refusal(value, hint, name) from error


def _refusal(value: Any, hint: Any, name: str) -> ConfigError:
    """Return the error for a value of a wrong type or range, or an unknown word."""
    kind, *metas = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        origin = typing.get_origin(kind) or kind
        words = {list: "a list", Mapping: "a table"}
        expected = words.get(origin, getattr(kind, "__name__", str(kind)))
        if origin is list and isinstance(value, list):
            expected = f"a list of {typing.get_args(kind)[0].__name__}"
        return ConfigError(f"{name} has the wrong type", given=repr(value), expected=expected)
    meta: msgspec.Meta = metas[0]
    if meta.extra is not None:
        if EXPECTED in meta.extra:
            return ConfigError(
                f"{name} is unknown", given=repr(value), expected=meta.extra[EXPECTED]
            )
        return unknown(name, value, meta.extra[CHOICES])
    if meta.le == 1:
        expected = f"{meta.ge} to {meta.le}"
        return ConfigError(f"{name} is out of range", given=value, expected=expected)
    if meta.ge == 0:
        return ConfigError(f"{name} must not be negative", given=value)
    return ConfigError(f"{name} is too small", given=value, expected=f"more than {meta.gt}")


def read_spec(tables: Mapping[str, Any]) -> JobSpec:
    """Return the job of parsed TOML; raises ConfigError."""
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
    if "launch" in values:
        values["launch"] = _with_references(values["launch"])
    spec = JobSpec(**values)
    nodes_set = "nodes" in tables.get("job", {})
    spec = with_log(
        with_tune(with_paths(with_swarm(spec, nodes_set=nodes_set), nodes_set=nodes_set))
    )
    if "rl" in tables:
        spec = with_members(spec, nodes_set=nodes_set)
        if "strategy" not in tables:
            spec = with_own_agreement(spec)
    _check_together(spec)
    return spec


def _with_bounds(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """Expand `nodes = {min, max}` in `[job]`; raises ConfigError for other keys or no `max`."""
    nodes = table.get("nodes")
    if not isinstance(nodes, Mapping):
        return table
    for key in nodes:
        if key not in ("min", "max"):
            raise unknown("key in nodes of [job]", key, ("min", "max"))
    if "max" not in nodes:
        raise ConfigError("nodes in [job] needs max", given=str(dict(nodes)), expected="{min, max}")
    return {**table, "nodes": nodes["max"], "min_nodes": nodes.get("min", 1)}


def _check_together(spec: JobSpec) -> None:
    """Refuse values that contradict each other."""
    check_name("job name", spec.job.name)
    check_whole(spec)
    check_island(largest_member(spec))
    check_swarm(spec)
    check_paths(spec)
    check_train(spec)
    check_tune(spec)
    check_log(spec)
    if not 0 <= spec.job.min_nodes <= spec.job.nodes:
        raise ConfigError(
            "min_nodes in [job] is out of range",
            given=spec.job.min_nodes,
            expected=f"a number from 0 to nodes, which is {spec.job.nodes}",
        )
    optimizer = spec.train.optimizer
    if optimizer not in OPTIMIZERS and not optimizer.startswith(TORCH_OPTIMIZER):
        raise unknown("optimizer in [train]", optimizer, (*OPTIMIZERS, "torch:NAME"))
    _check_program(spec)
    if not 0 < spec.data.held_out < 0.9:
        raise ConfigError(
            "held_out in [data] is out of range",
            given=spec.data.held_out,
            expected="a share between 0 and 0.9",
        )


def _check_program(spec: JobSpec) -> None:
    if spec.job.script and spec.job.command:
        raise ConfigError(
            "a job runs one program only",
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
    _check_copies(spec.checkpoint)


def _check_launch(launch: LaunchTable) -> None:
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
                "this entry of env in [launch] is not valid",
                given=repr(line),
                expected="NAME=VALUE, where NAME does not begin with ATOLL_",
            )
    for line in launch.secrets:
        if not re.fullmatch(r"(?!(?i:atoll_))\w+(=\w+)?", line, re.ASCII):
            raise ConfigError(
                "this entry of secrets in [launch] is not valid",
                given=repr(line),
                expected="NAME or VARIABLE=NAME, where VARIABLE does not begin with ATOLL_",
                remedy="the value is stored with `atoll secret set NAME`",
            )
    for name in ("mounts", "read_only", "signature"):
        if launch.launcher == "process" and getattr(launch, name):
            raise ConfigError(
                f"{name} in [launch] is for containers only",
                given=f"{name} = {getattr(launch, name)!r}",
                expected='launcher = "container" and an image',
            )


def _check_copies(checkpoint: CheckpointTable) -> None:
    for line in checkpoint.to_options:
        if not re.fullmatch(r"[A-Za-z_]\w*=(?!secret:).+|[A-Za-z_]\w*=secret:\w+", line, re.ASCII):
            raise ConfigError(
                "this entry of to_options in [checkpoint] is not valid",
                given=repr(line.partition("=")[0]),
                expected="NAME=VALUE or NAME=secret:SECRET, e.g. key=secret:S3_KEY",
                remedy="the value is stored with `atoll secret set NAME`",
            )
    if checkpoint.to_options and not checkpoint.to:
        raise ConfigError(
            "to_options in [checkpoint] need a place for copies",
            given='to = ""',
            expected="a URL such as s3://bucket/runs",
        )


def _with_references(launch: LaunchTable) -> LaunchTable:
    """Return the table with `NAME=secret:SECRET` of `env` as entries of `secrets`."""
    entries = [line.partition(f"={SECRET}") for line in launch.env]
    found = [f"{name}={secret}" for name, mark, secret in entries if mark]
    plain = [name for name, mark, _ in entries if not mark]
    if not found:
        return launch
    return dataclasses.replace(launch, env=plain, secrets=[*launch.secrets, *found])


def parse_spec(text: str, *, name: str = "the job file") -> JobSpec:
    """Return the job of a TOML text; raises ConfigError."""
    try:
        return read_spec(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} is not valid TOML", given=str(error)) from error


def worker_spec(environment: WorkerEnvironment) -> JobSpec:
    """Return the job as a worker sees it, with the device that it got; raises ConfigError."""
    spec = member_spec(load_spec(environment.spec), environment.member)
    device = environment.device or spec.job.device
    return dataclasses.replace(spec, job=dataclasses.replace(spec.job, device=device))


def load_spec(path: Path) -> JobSpec:
    """Return the job of a TOML file; raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "the job file cannot be read",
            given=f"{path} ({error})",
            expected="a TOML file; examples are in examples/",
        ) from error
    return parse_spec(text, name=str(path))
