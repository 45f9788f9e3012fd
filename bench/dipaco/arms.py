"""The arms of `bench.dipaco`: one seed of one arm is one part, so that a run can be resumed."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from atoll.data import ByteTokenizer, Documents, held_out_documents, load_dataset, train_documents
from atoll.data.assignment import Assignment
from atoll.models import GPT, GPTConfig
from atoll.routing.evaluate import (
    Chunks,
    LoadPath,
    chunk_features,
    chunks_of,
    path_losses,
    per_document,
    routed_loss,
)
from atoll.routing.features import FeatureModel
from atoll.routing.reader import reader_of, train_reader
from atoll.routing.router import Router, Scores, fitted
from atoll.routing.sharding import first_shards
from bench.dipaco.members import Data, train_members
from bench.dipaco.training import Modular, Setting, pretrained
from bench.dipaco.training import Path as ModulePath

LONGEST = 512
TOKENIZER = ByteTokenizer()
PREFIX = 96
"""Bytes; about as much text as the paper's 32 tokens."""
Losses = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long everything takes."""

    model: GPTConfig
    domain_bytes: int
    """Of text of each domain, in pieces of files of at most `file_bytes`."""
    file_bytes: int
    held_out: float
    """Share of the text; half of it fits routers, half is scored."""
    pretraining: int
    """Steps of the dense model that all arms start from."""
    inner_steps: int
    """Of a path between two outer steps."""
    rounds: int
    """Of every path; an eighth of them where there are sixteen paths, for they cost as much."""
    copies: int = 1
    """Paths of each document: with four paths, two would be half of the corpus for each."""
    reader_steps: int = 200
    """Of the small model of features, which is larger than a path."""
    lr: float = 3e-3
    batch: int = 8
    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    @property
    def setting(self) -> Setting:
        """What training needs."""
        return Setting(
            model=self.model, lr=self.lr, batch=self.batch, inner_steps=self.inner_steps,
            steps=self.rounds * self.inner_steps, outer_lr=self.outer_lr,
            outer_momentum=self.outer_momentum,
        )  # fmt: skip

    def eighth(self) -> Plan:
        """Return the same for sixteen paths."""
        return replace(self, rounds=max(2, self.rounds // 8))


QUICK = Plan(
    model=GPTConfig(layers=2, width=16, heads=2, context=64, tie=False),
    domain_bytes=30_000, file_bytes=4000, held_out=0.3, pretraining=60,
    inner_steps=20, rounds=4, reader_steps=40,
)  # fmt: skip
FULL = Plan(
    model=GPTConfig(layers=2, width=32, heads=2, context=64, tie=False),
    domain_bytes=120_000, file_bytes=8000, held_out=0.3, pretraining=200,
    inner_steps=5, rounds=96, batch=4, reader_steps=120,
)  # fmt: skip


@dataclass(frozen=True)
class Scored:
    """Held-out documents in chunks, and what a router knows of each: once, or again."""

    documents: Documents
    chunks: Chunks
    once: np.ndarray
    again: np.ndarray

    @property
    def prefixes(self) -> np.ndarray:
        """Features of each document with a chunk."""
        return self.once[np.unique(self.chunks.document, return_index=True)[1]]

    def loss(self, losses: Scores, chosen: np.ndarray) -> float:
        """Return nats per byte, each chunk by the path chosen for it."""
        each = losses[np.arange(len(losses)), chosen]
        return float((each @ self.chunks.tokens) / self.chunks.tokens.sum())


class Seed:
    """What the arms of one seed have in common: text, documents, first model, features."""

    def __init__(self, corpus: Path, plan: Plan, seed: int) -> None:
        """Read the corpus and cut it into documents."""
        self.plan, self.seed = plan, seed
        self.source = Data(f"files:{corpus}/*/*.txt", plan.held_out)
        share = plan.held_out
        self.data = load_dataset(self.source.corpus, seed=seed, held_out=share)
        self.documents = train_documents(self.data, seed=seed, held_out=share, longest=LONGEST)
        held_out = held_out_documents(self.data, seed=seed, held_out=share, longest=LONGEST)
        # Of different files, so that what fits the router is not what is scored.
        half = held_out.source % 2 == 0
        self._router_set, self._scored = some(held_out, half), some(held_out, ~half)

    @cached_property
    def start(self) -> GPT:
        """The dense model that every arm starts from."""
        text = self.documents.tokens.long()
        return pretrained(self.plan.setting, text, steps=self.plan.pretraining, seed=self.seed)

    @cached_property
    def reader(self) -> FeatureModel:
        """The small model of features."""
        weights = train_reader(self.data, seed=self.seed, steps=self.plan.reader_steps)
        assert weights is not None
        return reader_of(weights, prefix=PREFIX, tokenizer=TOKENIZER)

    @cached_property
    def features(self) -> np.ndarray:
        """Of all training documents' prefixes."""
        return self.reader.prefixes(self.documents, range(len(self.documents)), TOKENIZER)

    @cached_property
    def router_set(self) -> Scored:
        """What fits routers."""
        return self._featured(self._router_set)

    @cached_property
    def scored(self) -> Scored:
        """What is scored."""
        return self._featured(self._scored)

    def _featured(self, documents: Documents) -> Scored:
        chunks = chunks_of(documents, prefix=self.reader.prefix)
        each = [
            chunk_features(self.reader, documents, chunks, TOKENIZER, again=again)
            for again in (False, True)
        ]
        return Scored(documents, chunks, *each)

    def shards(self, modules: tuple[int, ...]) -> tuple[Router, Assignment]:
        """Return the first shards, by clusters."""
        return first_shards(
            self.features, self.documents.bounds, modules, seed=self.seed, copies=self.plan.copies
        )


def some(documents: Documents, chosen: np.ndarray) -> Documents:
    """Return some documents, as documents of their own."""
    texts = list(documents.chosen(np.flatnonzero(chosen)))
    bounds = np.concatenate(([0], np.cumsum([len(text) for text in texts])))
    return replace(
        documents, tokens=torch.cat(texts), bounds=bounds, source=documents.source[chosen]
    )


def dense(base: Seed) -> Losses:
    """One model of a path's size, by DiLoCo with four workers on everything."""
    model = Modular(base.plan.setting, base.start, [(0, 0)] * 4, seed=base.seed)
    for worker in model.workers:
        worker.text = base.documents.tokens.long()
    for _ in range(base.plan.rounds):
        model.round()
    losses = path_losses(model.load, 1, base.scored.documents, base.scored.chunks)
    return {"dense": base.scored.loss(losses, np.zeros(len(losses), dtype=np.int64))}


def independent(base: Seed) -> Losses:
    """Four experts without a common module, by plain AdamW: an outer step only harms them."""
    alone = replace(base.plan.setting, outer_lr=1.0, outer_momentum=0.0)
    return modular(base, "independent", [(n, n) for n in range(4)], (2, 2), setting=alone)


def independent_outer(base: Seed) -> Losses:
    """The same with DiPaCo's outer step, as the paper's experts have it."""
    return modular(base, "independent_outer", [(n, n) for n in range(4)], (2, 2))


def dipaco(base: Seed) -> Losses:
    """Four paths of two levels with two modules each."""
    return modular(base, "dipaco", every_path((2, 2)), (2, 2))


def sixteen(base: Seed) -> Losses:
    """Sixteen paths on sixteen workers."""
    return members(base, "dipaco_16", workers=16)


def by_turns(base: Seed) -> Losses:
    """Sixteen paths on four workers."""
    return members(base, "dipaco_by_turns", workers=4)


ARMS = {
    "dense": dense, "independent": independent, "independent_outer": independent_outer,
    "dipaco": dipaco, "sixteen": sixteen, "by_turns": by_turns,
}  # fmt: skip


def every_path(modules: tuple[int, ...]) -> list[ModulePath]:
    """Return all combinations of modules, the last level fastest, as `Router` numbers them."""
    return list(itertools.product(*map(range, modules)))


def modular(
    base: Seed, name: str, paths: Sequence[ModulePath], modules: tuple[int, ...],
    *, setting: Setting | None = None,
) -> Losses:  # fmt: skip
    """Train paths on their shards; score them."""
    model = Modular(setting or base.plan.setting, base.start, paths, seed=base.seed)
    _, shards = base.shards(modules)
    give(model, base.documents, shards)
    for _ in range(base.plan.rounds):
        model.round()
    return scores(base, name, model.load, modules)


def members(base: Seed, name: str, *, workers: int) -> Losses:
    """Train 4 x 4 modules with the trainer itself; score them."""
    modules, setting = (4, 4), base.plan.eighth().setting
    router, shards = base.shards(modules)
    with tempfile.TemporaryDirectory() as folder:
        load = train_members(
            setting, base.source, shards, Path(folder),
            start=base.start, modules=modules, workers=workers, seed=base.seed,
        )  # fmt: skip
    scored = (base.reader, base.scored.documents, TOKENIZER)
    return {name: routed_loss(load, router, *scored).loss}


def scores(base: Seed, name: str, load: LoadPath, modules: tuple[int, ...]) -> Losses:
    """Return the losses of paths that are routed once, by either router, again, and ideally."""
    own, count = base.router_set, len(every_path(modules))
    known = path_losses(load, count, own.documents, own.chunks)
    losses = path_losses(load, count, base.scored.documents, base.scored.chunks)
    clusters, _ = base.shards(modules)
    once = fitted(own.prefixes, per_document(known, own.chunks), modules)
    again = fitted(own.again, known, modules)
    return {
        name: base.scored.loss(losses, clusters.choose(base.scored.once)),
        f"{name}_fitted": base.scored.loss(losses, once.choose(base.scored.once)),
        f"{name}_rerouted": base.scored.loss(losses, again.choose(base.scored.again)),
        f"{name}_best_path": base.scored.loss(losses, losses.argmin(axis=1)),
    }


def give(model: Modular, documents: Documents, shards: Assignment) -> None:
    """Give every worker the text of its path's documents; an empty shard gets everything."""
    for path, worker in enumerate(model.workers):
        texts = list(documents.chosen(shards.documents(path)))
        worker.text = torch.cat(texts) if texts else documents.tokens.long()
