"""Every setting a person can write: frozen dataclasses read from TOML, defaults in one place.

A job file has the tables `[job]`, `[model]`, `[data]`, `[train]`, `[strategy]` and
`[checkpoint]`. `[model]` and `[strategy]` also take the options of the model and of the outer
strategy they name: each component declares its own options as a frozen dataclass and reads them
with :func:`read_table`. The environment is read in `environment`.
"""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from atoll.config.environment import WorkerEnvironment as WorkerEnvironment
from atoll.config.environment import child_environment as child_environment
from atoll.config.environment import home as home
from atoll.config.environment import read_worker_environment as read_worker_environment
from atoll.config.environment import worker_environment as worker_environment
from atoll.errors import ConfigError, unknown
from atoll.ids import check_name

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobTable:
    """`[job]`: what runs, where, and on how many machines."""

    name: str = "job"
    """Start of the job's name; a date is added."""
    nodes: int = 1
    """How many members train together; `nodes = {min = 2, max = 8}` lets them come and go."""
    min_nodes: int = 0
    """Below so many members the run pauses; 0: all are needed to start, one to go on."""
    seed: int = 7
    """Seed of the model, the data order and everything random."""
    route: str = "auto"
    """How tensors travel: `auto`, `direct` (torch.distributed) or `relay` (through the hub)."""
    script: str = ""
    """Python file to run instead of the built-in trainer."""
    args: list[str] = dataclasses.field(default_factory=list)
    """Arguments of the script."""
    threads: int = 1
    """torch threads per worker; 0 leaves torch's own choice."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataTable:
    """`[data]`: the text, how it becomes tokens, and how it is dealt out."""

    corpus: str = "stdlib"
    """`stdlib` (sources of Python's standard library) or `files:GLOB`."""
    tokenizer: str = "bytes"
    """`bytes`, or `bpe:SIZE` (trained on the corpus)."""
    order: str = "shuffled"
    """`shuffled`: blocks are dealt at random; `contiguous`: each slot gets one stretch."""
    held_out: float = 0.05
    """Share of the text that no shard contains."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainTable:
    """`[train]`: the inner optimizer and its schedule, per member."""

    steps: int = 2000
    """Optimizer steps of each member."""
    batch: int = 16
    """Sequences per step and member."""
    optimizer: str = "adamw"
    """`adamw` or `sgd`."""
    lr: float = 4e-3
    """Peak learning rate."""
    betas: list[float] = dataclasses.field(default_factory=lambda: [0.9, 0.95])
    """AdamW's two decay rates."""
    momentum: float = 0.0
    """Momentum of `sgd`."""
    weight_decay: float = 0.1
    """Decoupled weight decay (of matrices only)."""
    clip: float = 1.0
    """Largest gradient norm; 0 switches clipping off."""
    warmup: int = 50
    """Steps until the peak rate is reached."""
    schedule: str = "cosine"
    """`cosine` or `constant`, after the warm-up."""
    final_lr: float = 0.1
    """Last rate as a share of the peak, for `cosine`."""
    pace: str = "measured"
    """Steps per round: `measured` (slower machines do fewer, all arrive together) or `equal`."""
    eval_every: int = 0
    """Rounds between evaluations on held-out text; 0: about ten in a run."""
    eval_tokens: int = 65_536
    """Held-out tokens of one evaluation during the run (all of them at the end)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointTable:
    """`[checkpoint]`: when the state is saved."""

    every: int = 0
    """Rounds between checkpoints; 0: about eight in a run. A stop always saves one."""
    keep: int = 2
    """How many of the newest are kept."""
    keep_every: int = 0
    """Every checkpoint whose round is a multiple of this is kept, too; 0: none."""
    keep_best: int = 0
    """How many with the lowest held-out loss are kept, too."""
    to: str = ""
    """Folder or object store for copies, as an fsspec URL, e.g. `s3://bucket/runs`; empty: none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyTable:
    """`[strategy]`: inner x outer x codec; anything left out comes from the preset."""

    preset: str = "diloco"
    """A row of the table of presets, e.g. `diloco`, `local-sgd`, `ddp`, `alone`."""
    inner: str = ""
    """How one optimizer step is computed; empty: the preset's."""
    outer: str = ""
    """How members come to agree; empty: the preset's."""
    codec: str = ""
    """How tensors are encoded, e.g. `fp32`, `int8`, `feedback(int8)`; empty: the preset's."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Options of the outer strategy (every, outer_lr, ...): any other key of the table."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelTable:
    """`[model]`: which model."""

    name: str = "gpt"
    """A built-in model."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Options of that model (layers, width, ...): any other key of the table."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A whole job file."""

    job: JobTable = dataclasses.field(default_factory=JobTable)
    model: ModelTable = dataclasses.field(default_factory=ModelTable)
    data: DataTable = dataclasses.field(default_factory=DataTable)
    train: TrainTable = dataclasses.field(default_factory=TrainTable)
    strategy: StrategyTable = dataclasses.field(default_factory=StrategyTable)
    checkpoint: CheckpointTable = dataclasses.field(default_factory=CheckpointTable)


ROUTES = ("auto", "direct", "relay")
PACES = ("measured", "equal")
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
            return [_checked(item, inner, name) for item in value]
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
    if spec.job.route not in ROUTES:
        raise unknown("route", spec.job.route, ROUTES)
    positive = {
        "nodes in [job]": spec.job.nodes,
        "steps in [train]": spec.train.steps,
        "batch in [train]": spec.train.batch,
        "lr in [train]": spec.train.lr,
        "keep in [checkpoint]": spec.checkpoint.keep,
    }
    for name, value in positive.items():
        if not value > 0:
            raise ConfigError(f"{name} is too small", given=value, expected="more than 0")
    if not 0 <= spec.job.min_nodes <= spec.job.nodes:
        raise ConfigError(
            "min_nodes in [job] is out of range",
            given=spec.job.min_nodes,
            expected=f"a number from 0 to nodes, which is {spec.job.nodes}",
        )
    if spec.train.pace not in PACES:
        raise unknown("pace", spec.train.pace, PACES)
    if not 0 < spec.data.held_out < 0.9:
        raise ConfigError(
            "held_out in [data] is out of range",
            given=spec.data.held_out,
            expected="a share between 0 and 0.9",
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


def dump_spec(spec: JobSpec) -> str:
    """Return the job as TOML text with every default written out; `parse_spec` reads it back."""
    lines: list[str] = []
    for field in dataclasses.fields(spec):
        table = getattr(spec, field.name)
        lines.append(f"[{field.name}]")
        for entry in dataclasses.fields(table):
            value = getattr(table, entry.name)
            if entry.name == "options":
                lines += [f"{key} = {_toml(item)}" for key, item in value.items()]
            else:
                lines.append(f"{entry.name} = {_toml(value)}")
        lines.append("")
    return "\n".join(lines)


def _toml(value: Any) -> str:
    """Return a str, bool, number or list as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{escaped}"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    raise ConfigError("this value cannot be written as TOML", given=repr(value))
