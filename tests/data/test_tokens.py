import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.data import PretrainedTokenizer, Tokenizer, make_tokenizer, tokenizer_from_json
from atoll.data.tokens import PIECE_BYTES
from atoll.errors import ConfigError, DataError

TEXT = b"".join(
    b"def name_%d(self, value):\n    return self.value_%d + value\n\n" % (n, n) for n in range(300)
)


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return make_tokenizer("bpe:320", text=TEXT)


@given(data=st.binary(max_size=300))
def test_bytes_come_back_unchanged(data: bytes) -> None:
    tokenizer = make_tokenizer("bytes")
    ids = tokenizer.encode(data)
    assert ids.dtype == torch.uint16
    assert ids.tolist() == list(data)
    assert tokenizer.decode(ids) == data


@given(data=st.binary(max_size=300))
def test_byte_pairs_lose_nothing_even_on_invalid_utf8(bpe: Tokenizer, data: bytes) -> None:
    assert bpe.decode(bpe.encode(data)) == data


def test_byte_pairs_lose_nothing_on_text_longer_than_a_piece(bpe: Tokenizer) -> None:
    for data in (TEXT * 12, b"x" * 200_000, "Übermäßig 日本語 🙂\r\n".encode() * 5_000):
        assert bpe.decode(bpe.encode(data)) == data


def test_byte_pairs_shorten_what_they_were_trained_on(bpe: Tokenizer) -> None:
    ids = bpe.encode(TEXT)
    assert ids.dtype == torch.uint16
    assert len(ids) < len(TEXT) / 2
    assert bpe.vocab_size == 320
    assert bpe.name == "bpe:320"
    assert int(ids.long().max()) < 320


def test_training_twice_gives_the_same_tokenizer(bpe: Tokenizer) -> None:
    assert make_tokenizer("bpe:320", text=TEXT).to_json() == bpe.to_json()


@pytest.mark.parametrize("spec", ["bytes", "bpe:320"])
def test_saved_tokenizer_encodes_alike(spec: str) -> None:
    one = make_tokenizer(spec, text=TEXT)
    other = tokenizer_from_json(one.to_json())
    assert (other.name, other.vocab_size) == (one.name, one.vocab_size)
    assert torch.equal(one.encode(TEXT), other.encode(TEXT))


def test_nothing_encodes_to_nothing(bpe: Tokenizer) -> None:
    for tokenizer in (bpe, make_tokenizer("bytes")):
        assert tokenizer.encode(b"").tolist() == []
        assert tokenizer.decode(torch.empty(0, dtype=torch.int64)) == b""


def test_too_small_a_text_names_the_tokens_it_has() -> None:
    with pytest.raises(DataError, match=r"9 bytes, which make \d+ tokens.*4096"):
        make_tokenizer("bpe:4096", text=b"too small")


@pytest.mark.parametrize("spec", ["bpe", "bpe:", "bpe:many", "bpe:256", "bpe:-5", "bpe:1.5"])
def test_vocabulary_size_without_sense_is_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"needs a vocabulary size.*try bpe:4096"):
        make_tokenizer(spec, text=TEXT)


def test_unknown_tokenizer_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown tokenizer.*did you mean 'bytes'"):
        make_tokenizer("byte")


def test_missing_library_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match="pip install tokenizers, or use tokenizer = 'bytes'"):
        make_tokenizer("bpe:320", text=TEXT)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": "other"}'])
def test_broken_saved_tokenizer_is_refused(text: str) -> None:
    with pytest.raises(DataError, match="not a saved tokenizer"):
        tokenizer_from_json(text)


def test_a_character_between_two_pieces_stays_whole() -> None:
    library = pytest.importorskip("tokenizers")
    vocabulary = {"x": 0, "é": 1, "\ufffd": 2}
    tokenizer = PretrainedTokenizer(library.Tokenizer(library.models.BPE(vocabulary, [])))
    count = PIECE_BYTES // 2 + 1  # two bytes each, without a line break to cut at
    data = b"x" + "é".encode() * count
    assert tokenizer.encode(data).tolist() == [0, *[1] * count]
    assert tokenizer.encode(data[:-1]).tolist() == [0, *[1] * (count - 1), 2]
