"""A corpus -> shards and a router, from start to end: what `atoll paths shard` runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from atoll.checkpoint import Weights, describe, save_weights
from atoll.data import Dataset, Documents, Tokenizer, stream_dataset
from atoll.data.assignment import Assignment
from atoll.routing.features import PREFIX, Features
from atoll.routing.folder import FEATURES, ROUTER
from atoll.routing.parts import Work
from atoll.routing.reader import STEPS, reader_of
from atoll.routing.router import Router
from atoll.routing.sharding import COPIES, SLACK, first_shards, shard_words

NAME = "paths.safetensors"
"""The shards as a file of a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """How to shard."""

    modules: tuple[int, ...]
    prefix: int = PREFIX
    longest: int = 1024
    copies: int = COPIES
    slack: float = SLACK
    reader_steps: int = STEPS


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """The documents to be sharded."""

    dataset: Dataset
    documents: Documents
    seed: int

    @classmethod
    def streamed(
        cls, spec: str, file: Path, options: Shards, *, seed: int, tokenizer: str | Tokenizer,
        held_out: float,
    ) -> Corpus:  # fmt: skip
        """Find the documents of a job's data; raises as :func:`~atoll.data.stream_dataset`.

        The tokens are in `file`, so memory does not limit the size of the corpus.
        """
        dataset, documents = stream_dataset(
            spec, file, seed=seed, tokenizer=tokenizer, held_out=held_out, longest=options.longest
        )
        return cls(dataset, documents, seed)

    def work(self, reader: Weights, options: Shards) -> Work:
        """Return the features to be computed."""
        tokenizer = self.dataset.tokenizer
        model = reader_of(reader, prefix=options.prefix, tokenizer=tokenizer)
        return Work(model, self.documents, tokenizer)

    def merge(
        self, features: Features, options: Shards, reader: Weights, out: Path
    ) -> tuple[Router, Assignment]:
        """Make the shards and write all files; the same features give the same files.

        Writes `out`, and beside it the router and the small model under the names that a folder of
        paths has, with `out`'s stem before them.

        Raises:
            ConfigError: copies, slack or modules are out of range.
            DataError: there are fewer documents than paths.
        """
        router, made = first_shards(
            features, self.documents.bounds, options.modules, seed=self.seed, copies=options.copies,
            slack=options.slack,
        )  # fmt: skip
        tokenizer = self.dataset.tokenizer.to_json()
        router = replace(router, prefix=options.prefix, tokenizer=tokenizer)
        out.parent.mkdir(parents=True, exist_ok=True)
        router.write(out.with_name(f"{out.stem}.{ROUTER}"))
        about = describe(reader.model, options=reader.options, tokenizer=reader.tokenizer)
        save_weights(out.with_name(f"{out.stem}.{FEATURES}"), reader.state, about=about)
        modules = ",".join(map(str, options.modules))
        made = replace(made, data=self.dataset.digest)
        made.write(out, about={"modules": modules})
        return router, made

    def words(self, made: Assignment) -> list[str]:
        """Return lines that say what was made of what."""
        documents = self.documents
        lines = [f"{len(documents)} documents of {len(set(documents.source))} texts"]
        if documents.left_out:
            lines.append(f"left out: {documents.left_out} empty or wholly held-out texts")
        return lines + shard_words(made, [documents.domain(d) for d in range(len(documents))])
