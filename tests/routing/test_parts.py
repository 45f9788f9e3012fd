import dataclasses
from pathlib import Path

import numpy as np
import pytest

from atoll.checkpoint import Weights
from atoll.data import Dataset, train_documents
from atoll.errors import ConfigError, DataError
from atoll.routing.features import FeatureModel, Features
from atoll.routing.parts import Work, features_in
from atoll.routing.reader import reader_of, train_reader


@pytest.fixture
def work(reader: FeatureModel, dataset: Dataset) -> Work:
    documents = train_documents(dataset, seed=0, held_out=0.2, longest=100)
    return Work(reader, documents, dataset.tokenizer, size=20)


def whole_features(folder: Path, work: Work) -> Features:
    found = features_in(folder, work)
    assert found is not None
    return found


def small(dataset: Dataset, *, seed: int, steps: int) -> Weights:
    made = train_reader(dataset, seed=seed, steps=steps)
    assert made is not None
    return made


def test_parts_give_the_features_of_all_documents(work: Work, tmp_path: Path) -> None:
    found = whole_features(tmp_path, work)
    whole = work.reader.prefixes(work.documents, range(len(work.documents)), work.tokenizer)
    assert np.allclose(found, whole, atol=1e-6)


def test_a_stopped_work_continues_with_the_missing_parts(work: Work, tmp_path: Path) -> None:
    whole = whole_features(tmp_path / "whole", work)
    assert features_in(tmp_path, work, progress=lambda done, parts: done < 2) is None
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    kept = {path: time for path, time in kept.items() if "whole" not in path.parts}
    assert len(kept) == 2
    found = whole_features(tmp_path, work)
    assert np.array_equal(found, whole)
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items())


def test_a_damaged_part_is_computed_again(work: Work, tmp_path: Path) -> None:
    whole = whole_features(tmp_path, work)
    first = next(tmp_path.rglob("0-*.safetensors"))
    first.write_bytes(first.read_bytes()[:-7])
    assert np.array_equal(whole_features(tmp_path, work), whole)


def test_parts_of_other_work_are_not_used(
    work: Work, reader: FeatureModel, dataset: Dataset, tmp_path: Path
) -> None:
    features_in(tmp_path, work)
    shorter = FeatureModel(reader.model, reader.tokenizer, prefix=3)
    other = Work(shorter, work.documents, work.tokenizer, size=20)
    found = whole_features(tmp_path, other)
    assert np.array_equal(found, whole_features(tmp_path / "other", other))


def test_a_small_model_is_the_same_again(dataset: Dataset) -> None:
    made = [small(dataset, seed=1, steps=3) for _ in "ab"]
    texts = [dataset.train[:20]]
    features = [
        reader_of(weights, tokenizer=dataset.tokenizer).features(texts, dataset.tokenizer)
        for weights in made
    ]
    assert np.array_equal(features[0], features[1])
    other = small(dataset, seed=2, steps=3)
    assert not np.array_equal(features[0], reader_of(other).features(texts, dataset.tokenizer))


def test_training_a_small_model_can_be_stopped(dataset: Dataset) -> None:
    assert train_reader(dataset, seed=1, progress=lambda step, steps: step < 2) is None


def test_too_little_text_for_a_small_model_is_refused(dataset: Dataset) -> None:
    tiny = dataclasses.replace(dataset, train=dataset.train[:129])
    with pytest.raises(DataError, match="too little text"):
        train_reader(tiny, seed=0)


def test_a_prefix_beyond_the_small_model_is_refused(dataset: Dataset) -> None:
    weights = small(dataset, seed=0, steps=1)
    with pytest.raises(ConfigError, match="context"):
        reader_of(weights, prefix=129)
