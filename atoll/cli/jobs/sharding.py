"""`atoll paths shard`: on this machine, where it can be interrupted, and on several nodes."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress

from atoll.checkpoint import Weights, describe, load_weights, save_weights
from atoll.cli.jobs.interrupts import Interrupts
from atoll.cli.jobs.jobfile import Overrides, Submission, read_target
from atoll.cli.model_file import find_model
from atoll.cli.views import screen
from atoll.config import JobSpec, dump_spec
from atoll.data import Dataset, is_images
from atoll.errors import ConfigError
from atoll.routing.parts import features_in
from atoll.routing.reader import train_reader
from atoll.routing.shard import Corpus, Shards
from atoll.train.build import tokenizer_of

INTERRUPTED = 130


def counts_of(modules: str) -> tuple[int, ...]:
    """Return the numbers in e.g. ``2,2``; raises ConfigError."""
    words = modules.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(
            "modules of a level are a number", given=modules, expected="e.g. 2,2 or 4,4,4"
        )
    return tuple(int(word) for word in words)


def open_corpus(spec: JobSpec, options: Shards, file: Path) -> Corpus:
    """Return the documents of a job's data; their tokens are written to `file`.

    Raises:
        ConfigError: the data is not text.
        DataError: the corpus is missing or too small.
    """
    data = spec.data
    if is_images(data.corpus):
        raise ConfigError(
            "only documents are assigned to paths", given=f"corpus {data.corpus!r}",
            expected="a corpus of text",
        )  # fmt: skip
    return Corpus.streamed(
        data.corpus, file, options, seed=spec.job.seed, tokenizer=tokenizer_of(spec),
        held_out=data.held_out,
    )  # fmt: skip


def shard_here(job: Path, options: Shards, *, out: Path, reader: Path | None) -> int:
    """Shard a job's corpus on this machine; return the exit status.

    Raises:
        ConfigError: the job's data is not text, or an option is out of range.
        DataError: the corpus is missing, or too small for these paths.
    """
    spec, console = read_target(job, Overrides()).spec, screen.output()
    parts = out.with_name(f"{out.name}.parts")
    with Interrupts() as interrupts:
        corpus = open_corpus(spec, options, parts / "tokens.bin")
        weights = _reader(reader, corpus.dataset, options, parts, interrupts, spec.job.seed)
        if weights is not None:
            work = corpus.work(weights, options)
            with Progress(console=console, transient=True) as shown:
                row = shown.add_task("features", total=None)

                def step(done: int, of: int) -> bool:
                    shown.update(row, completed=done, total=of)
                    return not interrupts

                features = features_in(parts, work, progress=step)
            if features is not None:
                _, made = corpus.merge(features, options, weights, out)
                _say(console, [*corpus.words(made), f"wrote {out}"])
                shutil.rmtree(parts, ignore_errors=True)  # Windows keeps files that are mapped
                return 0
    _say(console, [f"interrupted; what is done is in {parts}: the same command continues"])
    return INTERRUPTED


def shard_job(job: Path, options: Shards, *, nodes: int) -> Submission:
    """Return a job that shards another job's corpus on several nodes.

    Its file `paths.safetensors` is collected in runs/JOB/. It may run where that job may.

    Raises:
        ConfigError: the job file cannot be read, or its data is not text.
    """
    spec = read_target(job, Overrides()).spec
    words = [dump_spec(spec), msgspec.json.encode(options).decode()]
    script = Path(__file__).with_name("shard_script.py")
    made = read_target(script, Overrides(nodes=nodes, arguments=words, on=spec.job.on))
    table = dataclasses.replace(made.spec.job, name=f"shards-{spec.job.name}"[:40], min_nodes=1)
    return dataclasses.replace(
        made, spec=dataclasses.replace(made.spec, job=table, needs=spec.needs)
    )


def _reader(
    file: Path | None,
    dataset: Dataset,
    options: Shards,
    parts: Path,
    interrupts: Interrupts,
    seed: int,
) -> Weights | None:
    """Return the small model: of `file`, kept from an interrupted run, or trained now."""
    if file is not None:
        return load_weights(find_model(file))
    kept = parts / f"reader-{dataset.digest[:16]}-{seed}-{options.reader_steps}.safetensors"
    if kept.is_file():
        return load_weights(kept)
    with Progress(console=screen.output(), transient=True) as shown:
        row = shown.add_task("training a small model for features", total=options.reader_steps)

        def step(done: int, of: int) -> bool:
            shown.update(row, completed=done)
            return not interrupts

        weights = train_reader(dataset, seed=seed, steps=options.reader_steps, progress=step)
    if weights is not None:
        about = describe(weights.model, options=weights.options, tokenizer=weights.tokenizer)
        save_weights(kept, weights.state, about=about)
    return weights


def _say(console: Console, lines: list[str]) -> None:
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)
