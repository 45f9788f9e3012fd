from pathlib import Path

import numpy as np
import pytest
import torch

from atoll.data import load_dataset
from atoll.data.documents import held_out_documents, train_documents
from atoll.errors import ConfigError, DataError

SEED = 3


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    for number in range(40):
        text = f"<{number:02}>" + chr(97 + number % 26) * (7 * number) + f"</{number:02}>"
        (tmp_path / f"{number:02}.txt").write_text(text)
    (tmp_path / "05.txt").write_bytes(b"")
    (tmp_path / "39.txt").write_bytes(b"")
    return f"files:{tmp_path}/*.txt"


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
@pytest.mark.parametrize("part", ["train", "held_out"])
def test_documents_are_pieces_of_their_own_text(corpus: str, tokenizer: str, part: str) -> None:
    data = load_dataset(corpus, seed=SEED, tokenizer=tokenizer, held_out=0.2)
    find = train_documents if part == "train" else held_out_documents
    documents = find(data, seed=SEED, held_out=0.2, longest=64)
    tokens = data.train if part == "train" else data.held_out.tokens
    assert documents.bounds[-1] == len(tokens)
    assert (documents.lengths > 0).all()
    assert documents.lengths.max() <= 64
    wrong = 0
    for number in range(len(documents)):
        text = data.tokenizer.decode(documents.ids(number)).decode()
        whole = Path(documents.names[documents.source[number]]).read_text() + "\n"
        inside = [letter in whole for letter in text]
        wrong += not all(inside[:-4])  # a token may reach over the end of a text
    assert wrong == 0


def test_all_bytes_are_in_one_document_each(corpus: str) -> None:
    data = load_dataset(corpus, seed=SEED, held_out=0.1)
    documents = train_documents(data, seed=SEED, held_out=0.1, longest=50)
    assert documents.bounds[0] == 0
    joined = torch.cat(list(documents.chosen(range(len(documents)))))
    assert torch.equal(joined, data.train.long())


def test_empty_texts_are_left_out_and_counted(corpus: str) -> None:
    data = load_dataset(corpus, seed=SEED, held_out=0.01)
    documents = train_documents(data, seed=SEED, held_out=0.01)
    names = {Path(documents.names[text]).stem for text in documents.source}
    assert "05" not in names
    assert "39" not in names
    assert documents.left_out == 40 - len(names) >= 2


def test_a_held_out_document_is_within_one_block(corpus: str) -> None:
    data = load_dataset(corpus, seed=SEED, held_out=0.2)
    documents = held_out_documents(data, seed=SEED, held_out=0.2)
    assert documents.lengths.max() <= 64  # the smallest block of the split
    assert set(np.diff(documents.source)) != {0}


def test_documents_of_another_split_are_refused(corpus: str, tmp_path: Path) -> None:
    data = load_dataset(corpus, seed=SEED)
    (tmp_path / "00.txt").write_text("longer than before")
    with pytest.raises(DataError, match="the same files"):
        train_documents(data, seed=SEED)


def test_pieces_of_one_token_are_refused(corpus: str) -> None:
    data = load_dataset(corpus, seed=SEED)
    with pytest.raises(ConfigError, match="too short"):
        train_documents(data, seed=SEED, longest=1)
