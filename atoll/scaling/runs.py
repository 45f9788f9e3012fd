"""Points from the folders of finished runs, or from a table.

A run's `summary.json` has parameters, tokens, members and the final held-out loss; its `job.toml`
has the method and the learning rates; the header of `model.safetensors` has the sizes of the
embeddings. What a run lacks is said with the file's name, and the run is left out.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.config import JobSpec, parse_spec
from atoll.errors import AtollError, ConfigError, RunsContradict
from atoll.scaling.points import VARIABLES, Point
from atoll.strategies.resolve import resolve

SUMMARY, JOB, MODEL = "summary.json", "job.toml", "model.safetensors"

EMBEDDINGS = re.compile(
    r"(^|\.)(embedding|embeddings|embed_tokens|tok_embeddings|wte|wpe|position_embedding|head|lm_head)"
    r"\.weight$"
)
"""Names of the weights that Kaplan et al. 2020 and others do not count."""

ALL, NON_EMBEDDING = "all parameters", "parameters without embeddings and output layer"

COUNTS = {"all": ALL, "non-embedding": NON_EMBEDDING}

COLUMNS = (*VARIABLES, "loss", "batch", "lr", "outer_lr", "name")

MAX_HEADER_BYTES = 100 * 2**20


@dataclass(frozen=True, kw_only=True)
class Found:
    """Points and how they were read."""

    points: tuple[Point, ...]
    counted: str
    """What `params` counts, in words."""
    skipped: tuple[str, ...] = ()
    """Runs that were left out: where, which file, and what is missing."""


@dataclass(frozen=True, kw_only=True)
class _Run:
    folder: Path
    spec: JobSpec
    summary: Mapping[str, Any]
    embedded: int | None
    """Parameters of embeddings and output layer; None: unknown."""

    def point(self, *, count: str) -> Point:
        summary, train = self.summary, self.spec.train
        params = int(summary["parameters"]) - (self.embedded or 0) * (count == "non-embedding")
        method = resolve(self.spec.strategy, steps=train.steps).method
        return Point(
            params=params, tokens=float(summary["tokens"]), members=float(summary["nodes"]),
            every=float(getattr(method, "every", 1)), loss=float(summary["loss_final"]),
            batch=float(train.batch * summary["nodes"]), lr=train.lr,
            outer_lr=float(getattr(method, "outer_lr", 0.0)), name=str(self.folder),
        )  # fmt: skip

    def kind(self) -> dict[str, object]:
        """Return what must be equal in all runs of a law."""
        spec, options = self.spec, self.spec.model.options
        method = resolve(spec.strategy, steps=spec.train.steps)
        data = {key: getattr(spec.data, key) for key in ("corpus", "tokenizer", "held_out")}
        kept = {"model": spec.model.name, "context": options.get("context"), **data}
        return kept | {"outer": method.outer, "codec": method.codec}


def read_points(paths: Sequence[Path], *, count: str = "") -> Found:
    """Return the points of run folders, of folders of run folders, or of one CSV file.

    Args:
        paths: Where they are.
        count: `all` or `non-embedding` parameters; empty: without embeddings where every run has
            its model file, else all.

    Raises:
        ConfigError: a path is none of these, or a table has wrong columns.
        RunsContradict: the runs are of different data, models or methods.
    """
    if count and count not in COUNTS:
        raise ConfigError(
            "parameters cannot be counted this way", given=repr(count), expected=" or ".join(COUNTS)
        )
    if len(paths) == 1 and paths[0].suffix == ".csv":
        return Found(points=read_csv(paths[0]), counted="params of the table")
    runs, skipped = [], []
    for folder in _folders(paths):
        found = _read_run(folder)
        if isinstance(found, str):
            skipped.append(f"{folder}: {found}")
        else:
            runs.append(found)
    _check_alike(runs)
    unknown = [run for run in runs if run.embedded is None]
    if count == "non-embedding":
        skipped += [
            f"{r.folder}: {MODEL} is missing, so its embeddings are unknown" for r in unknown
        ]
        runs = [run for run in runs if run.embedded is not None]
    chosen = count or ("all" if unknown else "non-embedding")
    points = tuple(run.point(count=chosen) for run in runs)
    return Found(points=points, counted=COUNTS[chosen], skipped=tuple(skipped))


def _folders(paths: Sequence[Path]) -> Iterable[Path]:
    """Yield the folders of runs at some paths, each once; files beside them are passed over."""
    seen: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise ConfigError(
                "there is no such run", given=str(path), expected="the folder of a run, or a .csv"
            )
        if path.is_dir():
            below = [] if (path / SUMMARY).exists() else sorted(path.glob(f"*/{JOB}"))
            for folder in [file.parent for file in below] or [path]:
                seen.setdefault(folder.resolve(), folder)
        elif path.suffix == ".csv":
            raise ConfigError(
                "a table cannot be mixed with runs", given=str(path), expected="one .csv file alone"
            )
    return seen.values()


def _read_run(folder: Path) -> _Run | str:
    """Return a run, or which file lacks what."""
    try:
        summary = json.loads((folder / SUMMARY).read_text("utf-8"))
        spec = parse_spec((folder / JOB).read_text("utf-8"), name=str(folder / JOB))
    except FileNotFoundError as error:
        missing = Path(str(error.filename)).name
        why = ": the run has not ended, or its results were not fetched" * (missing == SUMMARY)
        return f"{missing} is missing{why}"
    except (OSError, ValueError, AtollError) as error:
        what = error.what if isinstance(error, AtollError) else str(error)
        return f"it cannot be read ({what})"
    lacking = [
        key for key in ("parameters", "tokens", "nodes", "loss_final") if not summary.get(key)
    ]
    if spec.kind == "rl":
        return f"{JOB}: a job of policies has no loss to fit"
    if lacking:
        return f"{SUMMARY} has no {', '.join(lacking)}"
    if summary.get("stopped"):
        return f"{SUMMARY}: the run was stopped before its end"
    embedded = embedded_parameters(folder, parameters=int(summary["parameters"]))
    return _Run(folder=folder, spec=spec, summary=summary, embedded=embedded)


def embedded_parameters(folder: Path, *, parameters: int) -> int | None:
    """Return the parameters of embeddings and output layer, from a model file's header alone.

    An output layer that shares the embedding's weights counts once, even if the file has both.
    None: there is no model file, or none of its weights has a name that is known.

    Args:
        folder: Of the run.
        parameters: Of the whole model.
    """
    try:
        with (folder / MODEL).open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size)) if size <= MAX_HEADER_BYTES else {}
        sizes = {
            name: math.prod(entry["shape"]) for name, entry in header.items() if "shape" in entry
        }
    except (OSError, ValueError, TypeError):
        return None
    found = [size for name, size in sizes.items() if EMBEDDINGS.search(name)]
    twice = sum(sizes.values()) - parameters
    if twice in found:
        found.remove(twice)
    return sum(found) if found else None


def _check_alike(runs: Sequence[_Run]) -> None:
    """Check that runs differ only in what a law is about."""
    for run in runs[1:]:
        first, other = runs[0].kind(), run.kind()
        differs = [key for key in first if first[key] != other[key]]
        if differs:
            raise RunsContradict(
                "these runs are not of one kind, so no single law holds for them",
                given=f"{', '.join(differs)}: "
                f"{', '.join(str(first[key]) for key in differs)} in {runs[0].folder}, "
                f"{', '.join(str(other[key]) for key in differs)} in {run.folder}",
                expected="the same data, tokenizer, model, context, method and codec in all",
                remedy="name only the runs that belong together",
            )


def read_csv(path: Path) -> tuple[Point, ...]:
    """Return the points of a table with a heading; columns that it lacks count as 1 everywhere.

    Raises:
        ConfigError: it cannot be read, or a column or value is wrong; line and column are named.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:  # spreadsheets write a BOM
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError("a table cannot be read", given=f"{path} ({error})") from error
    heads = set(rows[0]) if rows else set()
    strange = sorted(str(head) for head in heads - set(COLUMNS))
    if strange or "loss" not in heads or not heads & {"params", "tokens"}:
        raise ConfigError(
            f"the columns of {path} are not those of runs",
            given=", ".join(strange) or ", ".join(sorted(heads)) or "an empty table",
            expected="loss, params or tokens (or both), and of "
            + ", ".join(name for name in COLUMNS if name not in ("loss", "params", "tokens")),
        )
    return tuple(_row(row, f"{path}:{line}") for line, row in enumerate(rows, start=2))


def _row(row: Mapping[str, str], where: str) -> Point:
    values: dict[str, Any] = dict.fromkeys(VARIABLES, 1.0)
    for name in COLUMNS[:-1]:
        text = (row.get(name) or "").strip()
        if not text and name in row and name in (*VARIABLES, "loss"):
            raise ConfigError(f"{name} is missing", given=where, expected="a number")
        try:
            values |= {name: float(text)} if text else {}
        except ValueError:
            raise ConfigError(
                f"{name} is not a number", given=f"{text!r} in {where}", expected="e.g. 1.2e6"
            ) from None
    return Point(name=row.get("name") or where, **values)
