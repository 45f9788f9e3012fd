"""A small corpus of planted domains, and models that read it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from atoll.data import ByteTokenizer, Dataset, load_dataset
from atoll.models import GPT, GPTConfig
from atoll.routing.features import FeatureModel

SEED = 0


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """Return a corpus of four domains, one alphabet each, a file of which is empty."""
    draw = torch.Generator().manual_seed(0)
    for domain, alphabet in enumerate(("abcde", "01234", "XYZWV", "+-*/=")):
        folder = tmp_path / "text" / f"domain{domain}"
        folder.mkdir(parents=True)
        for number in range(8):
            letters = torch.randint(5, (300,), generator=draw).tolist()
            (folder / f"{number}.txt").write_text("".join(alphabet[i] for i in letters))
        (folder / "short.txt").write_text(alphabet[:3])
    (tmp_path / "text" / "domain0" / "empty.txt").write_text("")
    return f"files:{tmp_path}/text/*/*.txt"


@pytest.fixture
def dataset(corpus: str) -> Dataset:
    return load_dataset(corpus, seed=SEED, held_out=0.2)


@pytest.fixture
def reader() -> FeatureModel:
    return small_reader()


def small_reader() -> FeatureModel:
    """Return a small model with random weights: letters of different alphabets differ in it."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=256, layers=1, width=16, heads=2, context=32, tie=False))
    return FeatureModel(model.eval(), ByteTokenizer(), prefix=16)
