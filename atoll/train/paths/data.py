"""The training data of each path of a job, and what is held out of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from atoll.config import JobSpec
from atoll.data import Dataset, Deal, PathShards, Shards, read_assignment
from atoll.data.dataset import HeldOutBatches
from atoll.errors import ConfigError, DataError
from atoll.train.build import Built


@dataclass(frozen=True, slots=True)
class PathData:
    """Samples of each path."""

    deal: Deal
    weights: Sequence[float]
    """Weight of a token of each path."""
    held_out: Callable[[int], HeldOutBatches] | None = None
    """Returns what is held out of a path; None: nothing is."""
    sizes: Sequence[tuple[int, int]] = ()
    """Documents and tokens of each path; empty: blocks are dealt evenly."""


def path_data(spec: JobSpec, built: Built) -> PathData:
    """Return the data of a job whose paths are its slots.

    Without an assignment blocks are dealt evenly, as they are to the members of other jobs.

    Raises:
        ConfigError: documents of images are not assigned to paths.
        DataError: the assignment is missing, or does not fit the job.
    """
    dipaco, dataset, shards = spec.dipaco, built.dataset, built.shards
    if not isinstance(dataset, Dataset) or not isinstance(shards, Shards):
        if dipaco.assignment or dipaco.held_out:
            raise ConfigError(
                "only documents of text can be assigned to paths, or held out of them",
                given=f"corpus = {spec.data.corpus!r}, assignment = {dipaco.assignment!r}, "
                f"held_out = {dipaco.held_out}",
                expected="a corpus of text", remedy='held_out = 0 and assignment = "" in [dipaco]',
            )  # fmt: skip
        return PathData(shards, [1.0] * dipaco.paths)
    if not dipaco.assignment and not dipaco.held_out:
        return PathData(shards, [1.0] * dipaco.paths)
    assignment = shards.assignment()
    if dipaco.assignment:
        assignment = read_assignment(Path(dipaco.assignment))
        if assignment.num_paths != dipaco.paths:
            raise DataError(
                "the documents are assigned to another number of paths",
                given=f"{assignment.num_paths} paths in {dipaco.assignment}",
                expected=f"{dipaco.paths}, as modules = {dipaco.modules} in [dipaco] says",
                remedy="assign the documents again, or change modules",
            )
        if assignment.data not in ("", dataset.digest):
            raise DataError(
                "the documents that are assigned to paths are not those of this job",
                given=f"data {assignment.data} in {dipaco.assignment}",
                expected=f"data {dataset.digest}: the same files, tokenizer, held_out and seed",
                remedy="assign the documents again with this job file: atoll paths shard",
            )
    found = PathShards(
        dataset.train, assignment, context=shards.context, seed=spec.job.seed,
        held_out=dipaco.held_out,
    )  # fmt: skip
    weights = found.weights if dipaco.weights == "shard" else [1.0] * dipaco.paths
    held_out = partial(partial, found.held_out) if dipaco.held_out else None
    return PathData(found, weights, held_out, found.sizes if dipaco.assignment else ())
