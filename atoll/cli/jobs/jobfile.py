"""Turn the arguments of `atoll run` into jobs with their files.

One job file can hold several jobs: the keys above its first `[[jobs]]` are common to them, and each
`[[jobs]]` overrides them key by key.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from atoll import config
from atoll.config.mesh import AXIS_OF
from atoll.errors import ConfigError
from atoll.ids import safe_name

MAX_SCRIPT_BYTES = 1 * 2**20
"""A script is sent to every node in one control frame; larger files are data."""


DEMO = "demo"
MOST_OF_DEMO = 8

PACKED = "sha256:"
"""Prefix of `code` in `[job]` when it is the hash of a pack instead of a folder."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A job as it is sent to the hub."""

    spec: config.JobSpec
    files: dict[str, str]
    code: Path | None = None
    """Folder sent with it as a pack."""

    @property
    def text(self) -> str:
        """The resolved job file."""
        return config.dump_spec(self.spec)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """Changes to a job by command options; None: unchanged."""

    nodes: int | None = None
    preset: str | None = None
    """A method in place of the file's: its options start at that preset's defaults."""
    outer: str | None = None
    codec: str | None = None
    every: int | None = None
    inner: str | None = None
    ranks: int | None = None
    """Processes of each member."""
    mesh: str | None = None
    """Ranks per axis, e.g. `replicate=2,tensor=2`."""
    precision: str | None = None
    device: str | None = None
    stages: int | None = None
    """Stages of a SWARM."""
    on: Sequence[str] = ()
    """Nodes that may run it."""
    priority: int | None = None
    settings: Sequence[str] = ()
    """``table.key=value``, the value as TOML (a bare word is a string)."""
    arguments: Sequence[str] = ()
    """Arguments of the script."""


def demo_text() -> str:
    """Return the demo's job file, which is part of the package."""
    return resources.files("atoll.cli").joinpath("demo.toml").read_text(encoding="utf-8")


def sort_words(target: Path, words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Split the arguments of `atoll run` into job files and script arguments.

    Words after a job file are job files too, as long as they end in .toml and exist.
    """
    files, rest = [target], list(words)
    while (
        target.suffix == ".toml" and rest and rest[0].endswith(".toml") and Path(rest[0]).is_file()
    ):
        files.append(Path(rest.pop(0)))
    return files, rest


def anywhere(submissions: Sequence[Submission], *, each: bool) -> list[Submission]:
    """Return jobs without node names, for running on this machine alone.

    Raises:
        ConfigError: they are to run on each node of a hub.
    """
    if each:
        raise ConfigError(
            "--each is for the nodes of a hub",
            given="--each and --local",
            expected="one of them; --local N runs each job of a file on its own node",
        )
    return [
        dataclasses.replace(
            one, spec=dataclasses.replace(one.spec, job=dataclasses.replace(one.spec.job, on=[]))
        )
        for one in submissions
    ]


def read_target(target: Path, overrides: Overrides) -> Submission:
    """Return the only job in a TOML file, or the job that runs a Python script.

    Raises:
        ConfigError: the file cannot be read, is wrong, holds several jobs, or is neither.
    """
    found = read_jobs(target, overrides)
    if len(found) > 1:
        raise ConfigError(
            "this file holds several jobs", given=str(target), expected="a file with one job"
        )
    return found[0]


def read_targets(targets: Sequence[Path], overrides: Overrides) -> list[Submission]:
    """Return all jobs in some files; raises as `read_target` does."""
    return [submission for target in targets for submission in read_jobs(target, overrides)]


def read_jobs(target: Path, overrides: Overrides) -> list[Submission]:
    """Return the jobs in a TOML file, or the one that runs a Python script.

    `demo` is the job of `atoll demo`, with as many members as there are places.

    Raises:
        ConfigError: the file cannot be read, is wrong, or is neither.
    """
    if str(target) == DEMO and not target.exists():
        tables = _parse(demo_text(), name="demo.toml")
        tables["job"] |= {"nodes": {"min": 1, "max": MOST_OF_DEMO}, "route": "auto"}
        return [build(tables, overrides)]
    if target.suffix == ".toml":
        tables = _parse(_read(target), name=str(target))
        return [_with_code(build(one, overrides), target) for one in _split(tables)]
    if target.suffix == ".py":
        tables = {"job": {"name": safe_name(target.stem), "script": target.name}}
        return [_with_script(build(tables, overrides).spec, target)]
    raise ConfigError(
        "this cannot be run",
        given=str(target),
        expected="a job file (.toml), a Python script (.py), or `demo`",
        remedy="`atoll run demo` trains a small GPT; examples are in examples/",
    )


def _split(tables: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tables of every job in a file."""
    several = tables.pop("jobs", None)
    if several is None:
        return [tables]
    listed = isinstance(several, list) and several
    if not listed or not all(isinstance(one, dict) for one in several):
        raise ConfigError(
            "jobs in the job file must be a list of tables",
            given=repr(several)[:200],
            expected="[[jobs]] once per job, its tables below it: [jobs.job], [jobs.model], ...",
        )
    return [_laid_over(tables, one) for one in several]


def _laid_over(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the common tables with one job's keys replaced."""
    names = {**common, **own}
    return {
        name: {**common.get(name, {}), **own.get(name, {})}
        if isinstance(common.get(name, {}), dict) and isinstance(own.get(name, {}), dict)
        else names[name]
        for name in names
    }


def _with_code(submission: Submission, target: Path) -> Submission:
    """Return a job with the code folder beside its job file."""
    job = submission.spec.job
    if job.code.startswith(PACKED):
        return submission
    if not job.code:
        beside = target.parent / job.script
        return _with_script(submission.spec, beside) if job.script else submission
    folder = target.parent / job.code
    for key, name in (("script", job.script), ("requirements", job.requirements)):
        if name and not (folder / name).is_file():
            raise ConfigError(
                f"{key} in [job] is not in its code",
                given=f"{name!r}, and code = {job.code!r}",
                expected=f"a file below {folder}",
            )
    return dataclasses.replace(submission, code=folder)


def build(tables: dict[str, Any], overrides: Overrides) -> Submission:
    """Return the job of parsed TOML with the overrides applied.

    Raises:
        ConfigError: a key or value is wrong.
    """
    if not all(isinstance(table, dict) for table in tables.values()):
        config.read_spec(tables)  # raises: it names what is not a table
    if overrides.preset is not None:
        tables["strategy"] = {"preset": overrides.preset}
    changes: dict[str, tuple[str, object]] = {
        "stages": ("swarm", overrides.stages),
        "nodes": ("job", overrides.nodes),
        "outer": ("strategy", overrides.outer),
        "codec": ("strategy", overrides.codec),
        "every": ("strategy", overrides.every),
        "precision": ("train", overrides.precision),
        "device": ("job", overrides.device),
        "on": ("job", list(overrides.on) or None),
        "priority": ("job", overrides.priority),
    }
    bounds = tables.get("job", {}).get("nodes")
    if overrides.nodes is not None and isinstance(bounds, dict) and "min" in bounds:
        least = min(bounds["min"], overrides.nodes)
        changes["nodes"] = ("job", {"min": least, "max": overrides.nodes})
    for key, (table, value) in changes.items():
        if value is not None:
            tables.setdefault(table, {})[key] = value
    _lay_island(tables, overrides)
    for setting in overrides.settings:
        table, key, value = _parse_setting(setting)
        tables.setdefault(table, {})[key] = value
    if overrides.arguments:
        tables.setdefault("job", {})["args"] = list(overrides.arguments)
    return Submission(config.read_spec(tables), {})


def _lay_island(tables: dict[str, Any], overrides: Overrides) -> None:
    """Apply overrides of how each member is spread over its processes.

    Ranks and mesh in the file belong to its inner strategy: another strategy resets them.
    """
    island = dict(tables.get("island", {}))
    strategy = tables.get("strategy", {})
    if overrides.inner is not None:
        strategy = {**strategy, "inner": overrides.inner}
        if overrides.inner != "hybrid":
            island.pop("mesh", None)
        if overrides.inner == "local":
            island.pop("ranks", None)
    if overrides.mesh is not None:
        island["mesh"] = _parse_mesh(overrides.mesh)
        island.pop("ranks", None)
        script = "script" in tables.get("job", {})
        axis = AXIS_OF.get(strategy.get("inner", ""))
        if overrides.inner is None and list(island["mesh"]) != [axis] and not script:
            strategy = {**strategy, "inner": "hybrid"}
    if overrides.ranks is not None:
        island["ranks"] = overrides.ranks
    for name, table in (("island", island), ("strategy", strategy)):
        if table or name in tables:
            tables[name] = table


def _parse_mesh(text: str) -> dict[str, int]:
    """Return the axes of ``replicate=2,tensor=2``; their names are checked later."""
    found: dict[str, int] = {}
    for part in text.replace(" ", "").split(","):
        axis, equals, size = part.partition("=")
        if not (axis and equals and size.isdecimal()) or axis in found:
            raise ConfigError(
                "this mesh cannot be read",
                given=repr(text),
                expected="AXIS=RANKS, each axis once, with commas between them",
                remedy="--mesh replicate=2,tensor=2",
            )
        found[axis] = int(size)
    return found


def parse_text(text: str, overrides: Overrides, *, name: str) -> Submission:
    """Return the job of TOML text with the overrides applied.

    Raises:
        ConfigError: it is wrong.
    """
    return build(_parse(text, name=name), overrides)


def change_for_resume(text: str, *, nodes: int | None, preset: str, settings: Sequence[str]) -> str:
    """Return a resolved job file with the changes for a resume; "" if there are none.

    Args:
        text: The job's own file.
        nodes: New number of members.
        preset: New strategy; its options start at that preset's defaults.
        settings: ``table.key=value``.

    Raises:
        ConfigError: a key or value is wrong.
    """
    if nodes is None and not preset and not settings:
        return ""
    tables = _parse(text, name="the job's file")
    if nodes is not None:
        tables["job"]["min_nodes"] = min(int(tables["job"].get("min_nodes", 0)), nodes)
    if preset:
        tables["strategy"] = {"preset": preset}
    return build(tables, Overrides(nodes=nodes, settings=settings)).text


def _parse(text: str, *, name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} is not valid TOML", given=str(error)) from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(
            "there is no such file",
            given=str(path),
            expected="a job file, a script, or `demo`",
            remedy=_near(path)
            or "atoll run demo trains a small model; docs/guide/jobs.md describes job files",
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "a file cannot be read", given=f"{path} ({error})", expected="a UTF-8 text file"
        ) from error


def _near(path: Path) -> str:
    """Return which file may have been meant: from this folder and those in it, one level down."""
    found = [str(one) for glob in ("*", "*/*") for one in Path().glob(glob + path.suffix)]
    close = difflib.get_close_matches(str(path), found, n=1, cutoff=0.7) if path.suffix else []
    return f"did you mean {close[0]}?" if close else ""


def _with_script(spec: config.JobSpec, path: Path) -> Submission:
    text = _read(path)
    if len(text.encode()) > MAX_SCRIPT_BYTES:
        raise ConfigError(
            "the script is too large to be sent to the nodes",
            given=f"{path}, {len(text.encode())} bytes",
            expected=f"at most {MAX_SCRIPT_BYTES} bytes",
        )
    job = dataclasses.replace(spec.job, script=path.name)
    return Submission(dataclasses.replace(spec, job=job), {path.name: text})


def _parse_setting(setting: str) -> tuple[str, str, object]:
    """Return table, key and value of ``table.key=value``."""
    name, equals, raw = setting.partition("=")
    table, dot, key = name.strip().partition(".")
    if not (equals and dot and table and key):
        raise ConfigError(
            "this setting cannot be read",
            given=repr(setting),
            expected="TABLE.KEY=VALUE, e.g. train.lr=1e-3",
        )
    try:
        value = tomllib.loads(f"value = {raw.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw.strip()  # a bare word
    return table, key, value
