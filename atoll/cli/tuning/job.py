"""Job files of `atoll tune`: from a model, files of examples and a few numbers."""

from __future__ import annotations

import glob
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.cli.jobs.jobfile import Overrides, Submission, build
from atoll.config import dump_tables
from atoll.config.tune_tables import FULL, PREFERENCES
from atoll.errors import ConfigError
from atoll.ids import safe_name

if TYPE_CHECKING:
    from atoll.data.tuning.dataset import ExampleSet

LR, LR_FULL, LR_PREFERENCES = 2e-4, 2e-5, 5e-5
"""Usual peak learning rates of adapters, of whole models, and of adapters that learn preferences.
"""
EVERY = 10
"""Steps between rounds: a few MB per round, so they may be frequent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningOptions:
    """The options of `atoll tune`; None: the usual."""

    model: str
    data: Sequence[str]
    weights: Sequence[float] = ()
    method: str = "lora"
    objective: str = "answers"
    rank: int = 16
    context: int = 512
    batch: int = 8
    lr: float | None = None
    steps: int | None = None
    passes: float = 1.0
    template: str = ""
    keep: Sequence[str] = ()
    nodes: int = 1
    settings: Sequence[str] = ()


def model_table(model: str) -> dict[str, str]:
    """Return `source`, and `gguf` for a GGUF file, of a model as a person names it.

    It is a folder, a GGUF file, `package:NAME`, or a name that the library can load. A folder or
    package with one GGUF file and no `config.json` means that file.

    Raises:
        DataError: the folder or package does not exist.
    """
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        return {"source": str(path.parent.resolve()), "gguf": path.name}
    from atoll.models.pretrained import place_of

    folder = Path(place_of(model))
    if not folder.is_dir():
        return {"source": model}
    source = model if model.startswith("package:") else str(folder.resolve())
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1 and not (folder / "config.json").exists():
        return {"source": source, "gguf": files[0].name}
    return {"source": source}


def job_tables(options: TuningOptions, *, steps: int) -> dict[str, Any]:
    """Return the tables of the job file."""
    source = model_table(options.model)
    named = source.get("gguf") or Path(source["source"].removeprefix("package:")).name
    usual = LR_PREFERENCES if options.objective in PREFERENCES else LR
    lr = options.lr or (LR_FULL if options.method == FULL else usual)
    return {
        "job": {"name": safe_name(f"tune-{Path(named).stem}")[:40].rstrip("-."),
                "nodes": options.nodes, "threads": 0},
        "model": {"name": "transformers", **source, "context": options.context},
        "tune": {
            "method": options.method, "objective": options.objective,
            "data": [_absolute(entry) for entry in options.data],
            "weights": list(options.weights), "rank": options.rank, "alpha": 2.0 * options.rank,
            "template": _template(options.template), "keep": list(options.keep),
        },
        "train": {
            "steps": steps, "batch": options.batch, "lr": lr, "weight_decay": 0.0,
            "warmup": max(1, steps // 20),
        },
        "strategy": {"preset": "diloco", "every": min(EVERY, steps), "codec": "int8"},
    }  # fmt: skip


def _absolute(entry: str) -> str:
    """Return the entry for any working folder; as it is if it names no files here."""
    path = Path(entry).expanduser()
    return str(path.absolute()) if glob.glob(str(path), recursive=True) else entry


def _template(word: str) -> str:
    """Return the text of a template's file; other words are as they are."""
    path = Path(word).expanduser()
    return path.read_text(encoding="utf-8") if word and path.is_file() else word


def tuning_job(
    options: TuningOptions, *, progress: Callable[[int], None]
) -> tuple[Submission, ExampleSet, str]:
    """Return the job, its examples, and the job file with what was chosen.

    Raises:
        ConfigError: an option is wrong.
        DataError: the model or the data are missing, or nothing in them can be used.
    """
    from atoll.data.tuning.dataset import load_examples
    from atoll.train.build import example_options, model_tokenizer

    overrides = Overrides(settings=options.settings)
    tables = job_tables(options, steps=options.steps or 1)
    submission = build(tables, overrides)
    found = load_examples(
        example_options(submission.spec), model_tokenizer(submission.spec), progress=progress
    )
    if options.steps is None:
        spec = submission.spec
        steps = steps_of(
            len(found.train), passes=options.passes, each=spec.train.batch * options.nodes
        )
        tables = job_tables(options, steps=steps)
        submission = build(tables, overrides)
    rows = len(found.train)
    if rows < options.nodes:
        raise ConfigError(
            "too few examples for so many members", given=f"{rows} rows, {options.nodes} members",
            expected="a row for each", remedy=f"--nodes {max(1, rows)}, or a shorter --context",
        )  # fmt: skip
    return submission, found, dump_tables(tables)


def steps_of(rows: int, *, passes: float, each: int) -> int:
    """Return the steps of so many passes over `rows`, of which a step of all takes `each`."""
    return max(1, math.ceil(passes * rows / each))
