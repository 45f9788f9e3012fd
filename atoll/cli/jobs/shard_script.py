"""What the members of `atoll paths shard --nodes N` run: it is sent to them as a script.

One member trains a small model; then all members compute features of ranges of documents, and one
merges them into `paths.safetensors`. Members may be killed, leave and join at any time: what is
done stays done.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

import atoll
from atoll.cli.jobs.sharding import open_corpus
from atoll.config import parse_spec
from atoll.routing.features import Features
from atoll.routing.shard import NAME, Shards
from atoll.routing.together import compute_together, train_reader_once


def main() -> None:
    """Take part; the arguments are the job file's text, and how to shard as JSON."""
    spec = parse_spec(sys.argv[1])
    options = msgspec.json.decode(sys.argv[2], type=Shards)
    with atoll.join() as run:
        corpus = open_corpus(spec, options, Path("tokens.bin"))
        dataset, seed = corpus.dataset, spec.job.seed
        reader = train_reader_once(run, dataset, seed=seed, steps=options.reader_steps)
        if reader is None:
            return

        def merge(features: Features) -> None:
            folder = Path("shards")
            _, made = corpus.merge(features, options, reader, folder / NAME)
            for file in sorted(folder.iterdir()):
                run.publish(file, file.name)
            print("\n".join(corpus.words(made)), flush=True)

        def show_progress(done: int, parts: int) -> None:
            print(f"{done} of {parts} parts", flush=True)

        compute_together(run, corpus.work(reader, options), merge, progress=show_progress)


if __name__ == "__main__":
    main()
