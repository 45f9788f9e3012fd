import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch

from atoll.data import Dataset, Documents, held_out_documents
from atoll.errors import ConfigError, DataError
from atoll.models import GPT, GPTConfig
from atoll.routing import evaluate
from atoll.routing.evaluate import (
    chunk_features,
    chunk_losses,
    chunks_of,
    path_losses,
    per_document,
    routed_loss,
)
from atoll.routing.features import FeatureModel
from atoll.routing.router import Router, clustered, fitted

EVERY = 12


@pytest.fixture
def documents(dataset: Dataset) -> Documents:
    return held_out_documents(dataset, seed=0, held_out=0.2)


@pytest.fixture
def paths() -> list[GPT]:
    made = []
    for seed in range(4):
        torch.manual_seed(seed)
        model = GPT(GPTConfig(layers=1, width=16, heads=2, context=24, tie=False))
        torch.nn.init.normal_(model.head.weight)
        made.append(model)
    return made


def with_other_text_from(documents: Documents, document: int, start: int) -> Documents:
    """Return the documents with every token of one of them changed from `start` on."""
    tokens = documents.tokens.clone()
    begin, end = (int(bound) for bound in documents.bounds[document : document + 2])
    tokens[begin + start : end] = (tokens[begin + start : end].int() + 1).to(tokens.dtype)
    return dataclasses.replace(documents, tokens=tokens)


def leaks(reader: FeatureModel, dataset: Dataset, documents: Documents, *, again: bool) -> int:
    """Return how many chunks are routed by features that depend on their own tokens."""
    chunks = chunks_of(documents, prefix=reader.prefix, every=EVERY)
    before = chunk_features(reader, documents, chunks, dataset.tokenizer, again=again)
    found = 0
    for row in range(len(chunks)):
        changed = with_other_text_from(documents, int(chunks.document[row]), int(chunks.start[row]))
        after = chunk_features(reader, changed, chunks, dataset.tokenizer, again=again)
        found += not np.array_equal(before[row], after[row])
    return found


@pytest.mark.parametrize("again", [False, True])
def test_no_scored_token_reaches_the_router(
    reader: FeatureModel, dataset: Dataset, documents: Documents, again: bool
) -> None:
    assert leaks(reader, dataset, documents, again=again) == 0


def test_a_router_that_sees_one_scored_token_is_caught(
    reader: FeatureModel, dataset: Dataset, documents: Documents, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest: Callable[..., torch.Tensor] = evaluate.text_before
    monkeypatch.setattr(
        evaluate, "text_before", lambda d, i, start, most: honest(d, i, start + 1, most)
    )
    chunks = chunks_of(documents, prefix=reader.prefix, every=EVERY)
    assert leaks(reader, dataset, documents, again=True) == len(chunks)


def test_the_prefix_is_never_scored(reader: FeatureModel, documents: Documents) -> None:
    chunks = chunks_of(documents, prefix=reader.prefix, every=EVERY)
    assert chunks.start.min() == reader.prefix
    assert chunks.tokens.sum() == (documents.lengths - reader.prefix).clip(0).sum()
    assert chunks.unscored == (documents.lengths <= reader.prefix).sum()


def test_every_token_after_the_prefix_is_scored_once(
    documents: Documents, paths: list[GPT]
) -> None:
    chunks = chunks_of(documents, prefix=1, every=EVERY)
    losses = chunk_losses(paths[0], documents, chunks)
    for document in range(len(documents)):
        ids = documents.ids(document)[: 24 + 1]  # what the model reads at once
        if len(ids) < 2:
            continue
        with torch.no_grad():
            whole = paths[0](ids[None, :-1])[0].log_softmax(-1)
        each = -whole[torch.arange(len(ids) - 1), ids[1:]].numpy()
        rows = np.flatnonzero((chunks.document == document) & (chunks.stop <= 24))
        for row in rows:
            expected = each[chunks.start[row] - 1 : chunks.stop[row] - 1].sum()
            assert losses[row] == pytest.approx(expected, rel=1e-4)


def test_a_batch_is_scored_like_single_chunks(documents: Documents, paths: list[GPT]) -> None:
    chunks = chunks_of(documents, prefix=5, every=EVERY)
    together = chunk_losses(paths[0], documents, chunks)
    assert np.allclose(together, chunk_losses(paths[0], documents, chunks, batch=1), rtol=1e-4)


def test_one_path_for_all_loses_what_that_path_loses(
    reader: FeatureModel, dataset: Dataset, documents: Documents, paths: list[GPT]
) -> None:
    always = Router((2, 2), np.zeros((4, 16)), np.array([0.0, 0.0, 1.0, 0.0]))
    chunks = chunks_of(documents, prefix=reader.prefix, every=EVERY)
    alone = chunk_losses(paths[2], documents, chunks).sum() / chunks.tokens.sum()
    for every in (None, EVERY):
        found = routed_loss(
            paths.__getitem__, always, reader, documents, dataset.tokenizer, every=every,
            chunk=EVERY,
        )  # fmt: skip
        assert found.loss == pytest.approx(alone, rel=1e-6)
        assert found.tokens == chunks.tokens.sum()
        assert set(found.chosen) == {2}


def test_only_chosen_paths_are_loaded_and_each_once(
    reader: FeatureModel, dataset: Dataset, documents: Documents, paths: list[GPT]
) -> None:
    loaded: list[int] = []

    def load(path: int) -> GPT:
        loaded.append(path)
        return paths[path]

    chunks = chunks_of(documents, prefix=reader.prefix, every=EVERY)
    features = chunk_features(reader, documents, chunks, dataset.tokenizer, again=True)
    router = clustered(features, (2, 1), seed=0)
    found = routed_loss(load, router, reader, documents, dataset.tokenizer, every=EVERY)
    assert sorted(loaded) == sorted(set(found.chosen)) == [0, 1]


def test_routing_again_changes_paths_within_a_document(
    reader: FeatureModel, dataset: Dataset, documents: Documents, paths: list[GPT]
) -> None:
    chunks = chunks_of(documents, prefix=reader.prefix, every=EVERY)
    losses = path_losses(paths.__getitem__, 4, documents, chunks)
    features = chunk_features(reader, documents, chunks, dataset.tokenizer, again=True)
    router = fitted(features, losses, (2, 2))
    once = routed_loss(paths.__getitem__, router, reader, documents, dataset.tokenizer, chunk=EVERY)
    again = routed_loss(
        paths.__getitem__, router, reader, documents, dataset.tokenizer, every=EVERY
    )
    of_one = chunks.document == chunks.document[np.bincount(chunks.document).argmax()]
    for document in np.unique(chunks.document):
        assert len(set(once.chosen[chunks.document == document])) == 1
    assert of_one.any()
    assert (once.chosen != again.chosen).any()
    assert losses.min(axis=1) @ chunks.tokens / again.tokens <= again.loss


def test_losses_of_documents_are_those_of_their_chunks(
    documents: Documents, paths: list[GPT]
) -> None:
    chunks = chunks_of(documents, prefix=4, every=EVERY)
    losses = path_losses(paths.__getitem__, 2, documents, chunks)
    whole = per_document(losses, chunks)
    long = np.flatnonzero(documents.lengths > 4)
    assert len(whole) == len(long)
    total = (whole * (documents.lengths[long] - 4)[:, None]).sum(0)
    assert np.allclose(total, (losses * chunks.tokens[:, None]).sum(0))


def test_documents_within_the_prefix_only_are_refused(documents: Documents) -> None:
    with pytest.raises(DataError, match="no document has a token to score"):
        chunks_of(documents, prefix=1000)


def test_chunks_beyond_the_context_are_refused(documents: Documents, paths: list[GPT]) -> None:
    with pytest.raises(ConfigError, match="chunks do not fit"):
        chunk_losses(paths[0], documents, chunks_of(documents, prefix=2, every=40))
