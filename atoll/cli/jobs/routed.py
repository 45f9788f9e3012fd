"""`atoll paths evaluate`: the loss of a finished run's paths on texts, routed once and again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.table import Table

from atoll.cli.views import screen
from atoll.config import load_spec
from atoll.data import Documents, all_documents, held_out_documents, load_dataset
from atoll.devices.choose import choose
from atoll.errors import ConfigError
from atoll.models import LanguageModel
from atoll.routing.evaluate import RoutedLoss, routed_loss
from atoll.routing.folder import PathFolder, open_paths


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """What is scored, and how."""

    data: str
    """A corpus; empty: what the run held out."""
    every: int
    shards: Path | None
    longest: int
    device: str


def score_run(run: Path, options: Scoring) -> None:
    """Print the loss of a run's paths.

    Raises:
        CheckpointError: there are no paths, or no router.
        ConfigError: a chunk does not fit the models, or the run's data is not known.
        DataError: the texts are missing, or none is longer than the prefix.
    """
    paths, console = open_paths(run, shards=options.shards), screen.output()
    documents = _documents(run, paths, options)
    device, reader = choose(options.device), paths.reader()
    opened: dict[int, LanguageModel] = {}

    def load(path: int) -> LanguageModel:
        opened.clear()  # one in memory at a time
        opened[path] = paths.load(path).to(device)
        return opened[path]

    console.print(f"{len(documents)} documents, {len(documents.tokens)} tokens", markup=False)
    rows = {
        name: routed_loss(
            load, paths.router, reader, documents, paths.tokenizer, every=every, chunk=options.every
        )
        for name, every in (("once", None), (f"every {options.every}", options.every))
    }
    for table in (_losses(rows), _choices(list(rows), [*rows.values()], paths.num_paths)):
        console.print(table)
    least = next(iter(rows.values()))
    words = f"not scored: the first {paths.router.prefix} tokens of each document"
    if least.unscored:
        words += f", and {least.unscored} documents that are not longer"
    console.print(words, soft_wrap=True, markup=False)


def _documents(run: Path, paths: PathFolder, options: Scoring) -> Documents:
    if options.data:
        return all_documents(options.data, paths.tokenizer, longest=options.longest)
    file = run / "job.toml"
    if not file.is_file():
        raise ConfigError(
            "it is not known what this run held out", given=f"no file {file}",
            expected="the folder of a run",
            remedy="name a corpus: atoll paths evaluate RUN files:GLOB",
        )  # fmt: skip
    spec = load_spec(file)
    data, seed = spec.data, spec.job.seed
    dataset = load_dataset(
        data.corpus, seed=seed, tokenizer=paths.tokenizer, held_out=data.held_out
    )
    return held_out_documents(dataset, seed=seed, held_out=data.held_out, longest=options.longest)


def _losses(rows: dict[str, RoutedLoss]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("routed")
    for heading in ("nats per token", "tokens scored"):
        table.add_column(heading, justify="right")
    for name, found in rows.items():
        table.add_row(name, f"{found.loss:.4f}", str(found.tokens))
    return table


def _choices(names: Sequence[str], found: Sequence[RoutedLoss], paths: int) -> Table:
    """Return how many chunks each path was chosen for."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("path", justify="right")
    for name in names:
        table.add_column(f"chunks, {name}", justify="right")
    counts = [np.bincount(one.chosen, minlength=paths) for one in found]
    for path in range(paths):
        if any(count[path] for count in counts):
            table.add_row(str(path), *(str(count[path]) for count in counts))
    return table
