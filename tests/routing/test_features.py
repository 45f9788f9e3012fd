import dataclasses

import numpy as np
import pytest
import torch

from atoll.data import ByteTokenizer, Dataset, make_tokenizer, train_documents
from atoll.errors import ConfigError, DataError
from atoll.models import GPT, GPTConfig, LanguageModel
from atoll.routing.features import FeatureModel, hidden_states
from atoll.routing.sharding import first_shards

BYTES = ByteTokenizer()


def ids(text: str) -> torch.Tensor:
    return BYTES.encode(text.encode())


def test_features_are_the_mean_of_the_last_hidden_states(reader: FeatureModel) -> None:
    found = reader.features([ids("hello")], BYTES)
    with torch.no_grad():
        hidden = hidden_states(reader.model, ids("hello").long()[None])
        assert isinstance(reader.model, GPT)
        logits = reader.model.head(hidden)
        assert torch.allclose(logits, reader.model(ids("hello").long()[None]))
    assert np.allclose(found[0], hidden[0].mean(0).numpy(), atol=1e-6)


def test_features_are_deterministic_and_alone(reader: FeatureModel) -> None:
    texts = [ids(text) for text in ("a", "some words", "other words", "x" * 16)]
    together = reader.features(texts, BYTES)
    assert np.array_equal(together, reader.features(texts, BYTES))
    alone = np.concatenate([reader.features([text], BYTES) for text in texts])
    assert np.allclose(together, alone, atol=1e-6)


def test_only_the_prefix_of_a_document_is_read(reader: FeatureModel, dataset: Dataset) -> None:
    documents = train_documents(dataset, seed=0, held_out=0.2, longest=100)
    chosen = list(range(len(documents)))
    found = reader.prefixes(documents, chosen, BYTES)
    changed = dataset.train.clone()
    for start, stop in zip(documents.bounds[:-1] + 16, documents.bounds[1:], strict=True):
        changed[start:stop] = 0
    other = dataclasses.replace(documents, tokens=changed)
    assert np.array_equal(found, reader.prefixes(other, chosen, BYTES))


def test_documents_shorter_than_the_prefix_use_what_they_have(
    reader: FeatureModel, dataset: Dataset
) -> None:
    documents = train_documents(dataset, seed=0, held_out=0.2)
    short = [d for d in range(len(documents)) if documents.lengths[d] < reader.prefix]
    assert short
    found = reader.prefixes(documents, short, BYTES)
    for row, text in zip(found, documents.chosen(short), strict=True):
        assert np.allclose(row, reader.features([text], BYTES)[0], atol=1e-6)


def test_a_router_finds_the_domains_of_a_corpus(reader: FeatureModel, dataset: Dataset) -> None:
    documents = train_documents(dataset, seed=0, held_out=0.2, longest=100)
    long = [d for d in range(len(documents)) if documents.lengths[d] >= reader.prefix]
    features = reader.prefixes(documents, long, BYTES)
    bounds = 16 * np.arange(len(long) + 1)
    _, made = first_shards(features, bounds, (2, 2), seed=0, copies=1, slack=2.0)
    domains = [documents.domain(d) for d in long]
    assert len(set(zip(domains, made.paths[:, 0], strict=True))) == 4


def test_texts_of_another_vocabulary_are_encoded_again(reader: FeatureModel) -> None:
    text = b"the quick brown fox " * 30
    pairs = make_tokenizer("bpe:270", text=text)
    tokens = pairs.encode(text)[:10]
    again = reader.tokenizer.encode(pairs.decode(tokens))[-32:]
    found = reader.features([tokens], pairs)
    assert np.allclose(found, reader.features([again], BYTES), atol=1e-6)


def test_an_equal_tokenizer_is_not_another_one(reader: FeatureModel) -> None:
    assert np.array_equal(
        reader.features([ids("words")], ByteTokenizer()), reader.features([ids("words")], BYTES)
    )


@pytest.mark.parametrize("text", ["", "x" * 33])
def test_empty_and_too_long_texts_are_refused(reader: FeatureModel, text: str) -> None:
    with pytest.raises(DataError, match="no features"):
        reader.features([ids(text)], BYTES)


def test_a_prefix_beyond_the_context_is_refused(reader: FeatureModel) -> None:
    with pytest.raises(ConfigError, match="the model's context"):
        FeatureModel(reader.model, BYTES, prefix=33)


def test_a_model_without_units_is_refused() -> None:
    class Whole(LanguageModel):
        config = GPTConfig()

    with pytest.raises(ConfigError, match="made of units"):
        FeatureModel(Whole(), BYTES)
