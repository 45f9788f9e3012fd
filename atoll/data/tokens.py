"""Tokenizers: plain bytes, a byte-pair encoding trained on the text, or that of a pretrained model.

The first two are lossless on any bytes.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from atoll.errors import ConfigError, DataError, unknown

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HuggingFaceTokenizer

SMALLEST_BPE = 257
LARGEST_UINT16 = 1 << 16
FORMAT = "atoll-tokenizer-1"


# Merges never cross these pieces: a word with its leading space, a number, punctuation, white
# space. Bytes from 0x80 count as letters, so that UTF-8 words stay whole.
_PIECES = r" ?[A-Za-z_\x{80}-\x{FF}]+| ?[0-9]+| ?[^\sA-Za-z_0-9\x{80}-\x{FF}]+|\s+"
PIECE_BYTES = 1 << 16
"""Texts are encoded in pieces of at most so many bytes."""


class Tokenizer(Protocol):
    """Converts bytes to token ids and back, losslessly except for pretrained ones."""

    @property
    def name(self) -> str:
        """Its spec, e.g. ``"bytes"`` or ``"bpe:4096"``."""

    @property
    def vocab_size(self) -> int:
        """Number of distinct ids, which start at 0."""

    def encode(self, data: bytes) -> Tensor:
        """Return the ids, 1-D, uint16 if the vocabulary fits, else int32."""

    def decode(self, ids: Tensor) -> bytes:
        """Return the bytes of 1-D integer ids."""

    def to_json(self) -> str:
        """Return the input of :func:`tokenizer_from_json`."""


class ByteTokenizer:
    """A token is a byte."""

    name = "bytes"
    vocab_size = 256

    def encode(self, data: bytes) -> Tensor:
        """Return one uint16 id per byte."""
        return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).astype(np.uint16))

    def decode(self, ids: Tensor) -> bytes:
        """Return one byte per id."""
        return ids.detach().cpu().numpy().astype(np.uint8).tobytes()

    def to_json(self) -> str:
        """Return its name."""
        return json.dumps({"format": FORMAT, "name": self.name})


class BytePairTokenizer:
    """Byte-pair encoding over raw bytes, on the `tokenizers` library.

    Each byte is passed as the Latin-1 character of the same number, so invalid UTF-8 is preserved.
    """

    def __init__(self, inner: HuggingFaceTokenizer) -> None:
        self._inner = inner
        self.vocab_size: int = inner.get_vocab_size()
        self.name = f"bpe:{self.vocab_size}"
        self._pieces = [b""] * self.vocab_size
        for piece, index in inner.get_vocab().items():
            self._pieces[index] = piece.encode("latin-1")

    def encode(self, data: bytes) -> Tensor:
        """Return the ids: uint16 if the vocabulary fits, else int32."""
        kind = np.uint16 if self.vocab_size <= LARGEST_UINT16 else np.int32
        encoded = self._inner.encode_batch_fast(list(_pieces(data)), add_special_tokens=False)
        parts = [np.array(part.ids, dtype=kind) for part in encoded]
        return torch.from_numpy(np.concatenate(parts) if parts else np.empty(0, dtype=kind))

    def decode(self, ids: Tensor) -> bytes:
        """Return the joined bytes of the ids."""
        return b"".join(self._pieces[index] for index in ids.tolist())

    def to_json(self) -> str:
        """Return the vocabulary and its merges."""
        inner = json.loads(self._inner.to_str())
        return json.dumps({"format": FORMAT, "name": self.name, "bpe": inner})


class PretrainedTokenizer:
    """A tokenizer of the `tokenizers` library, as published with a model.

    Not lossless: invalid UTF-8 is replaced, and some tokenizers drop spaces or case. No special
    tokens are added.
    """

    name = "model"

    def __init__(self, inner: HuggingFaceTokenizer) -> None:
        self._inner = inner
        self.vocab_size: int = inner.get_vocab_size()

    def encode(self, data: bytes) -> Tensor:
        """Return the ids: uint16 if the vocabulary fits, else int32."""
        kind = np.uint16 if self.vocab_size <= LARGEST_UINT16 else np.int32
        encoded = self._inner.encode_batch_fast(_texts(data), add_special_tokens=False)
        parts = [np.array(part.ids, dtype=kind) for part in encoded]
        return torch.from_numpy(np.concatenate(parts) if parts else np.empty(0, dtype=kind))

    def decode(self, ids: Tensor) -> bytes:
        """Return the text as UTF-8."""
        text: str = self._inner.decode(ids.tolist(), skip_special_tokens=False)
        return text.encode("utf-8")

    def to_json(self) -> str:
        """Return the whole tokenizer."""
        inner = json.loads(self._inner.to_str())
        return json.dumps({"format": FORMAT, "name": self.name, "pretrained": inner})


def make_tokenizer(spec: str, *, text: bytes | None = None) -> Tokenizer:
    """Return the tokenizer ``bytes`` or ``bpe:SIZE``, the latter trained on ``text``.

    Raises:
        ConfigError: no such tokenizer, a size out of range, or a library is missing.
        DataError: the text is too small for this vocabulary; states both numbers.
    """
    return train_tokenizer(spec, pieces(text or b""))


def train_tokenizer(spec: str, text: Iterable[bytes]) -> Tokenizer:
    """Return the tokenizer of :func:`make_tokenizer`, of a text in its `pieces`."""
    if spec == "bytes":
        return ByteTokenizer()
    kind, _, size = spec.partition(":")
    if kind != "bpe":
        raise unknown("tokenizer", kind, ("bytes", "bpe"))
    if not re.fullmatch(r"[0-9]{1,7}", size) or int(size) < SMALLEST_BPE:
        raise ConfigError(
            "a byte-pair tokenizer needs a vocabulary size",
            given=spec,
            expected=f"bpe:SIZE with SIZE of {SMALLEST_BPE} or more",
            remedy="try bpe:4096",
        )
    return _trained(int(size), text)


def tokenizer_from_json(text: str) -> Tokenizer:
    """Restore a tokenizer from :meth:`Tokenizer.to_json`; raises DataError, ConfigError."""
    try:
        fields: dict[str, Any] = json.loads(text)
        if fields["format"] == FORMAT and fields["name"] == "bytes":
            return ByteTokenizer()
        if "pretrained" in fields:
            return PretrainedTokenizer(tokenizers_from(json.dumps(fields["pretrained"])))
        inner = json.dumps(fields["bpe"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            "this is not a saved tokenizer", given=f"{text[:60]!r}", expected=f"JSON of {FORMAT}"
        ) from error
    return BytePairTokenizer(tokenizers_from(inner))


def tokenizers_from(text: str) -> HuggingFaceTokenizer:
    """Load a tokenizer of the library from its JSON; ConfigError if the library is missing."""
    made: HuggingFaceTokenizer = _library().Tokenizer.from_str(text)
    return made


def _trained(size: int, text: Iterable[bytes]) -> BytePairTokenizer:
    library = _library()
    inner = library.Tokenizer(library.models.BPE())
    inner.pre_tokenizer = library.pre_tokenizers.Split(
        library.Regex(_PIECES), behavior="isolated", invert=False
    )
    alphabet = [chr(value) for value in range(256)]
    trainer = library.trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    num_bytes = 0

    def counted() -> Iterator[str]:
        nonlocal num_bytes
        for piece in text:
            num_bytes += len(piece)
            yield piece.decode("latin-1")

    inner.train_from_iterator(counted(), trainer=trainer)
    if inner.get_vocab_size() < size:
        raise DataError(
            "the text is too small for this tokenizer",
            given=f"{num_bytes} bytes, which make {inner.get_vocab_size()} tokens",
            expected=f"enough for {size} tokens",
            remedy=f"more text, or bpe:{max(SMALLEST_BPE, inner.get_vocab_size())} or less",
        )
    return BytePairTokenizer(inner)


def _pieces(data: bytes) -> Iterator[str]:
    return (piece.decode("latin-1") for piece in pieces(data))


def _texts(data: bytes) -> list[str]:
    """Return the data in pieces of text; a character that two pieces share is in the second."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    found = [*map(decoder.decode, pieces(data)), decoder.decode(b"", final=True)]
    return [text for text in found if text]


def pieces(data: bytes) -> Iterator[bytes]:
    """Yield the data in pieces cut after line breaks: the library is slow on one huge string."""
    start = 0
    while start < len(data):
        end = min(start + PIECE_BYTES, len(data))
        cut = data.rfind(b"\n", start, end) + 1 if end < len(data) else end
        end = cut if cut > start else end
        yield data[start:end]
        start = end


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ConfigError(
            "byte-pair tokenizers need a library that is not installed",
            given="no module named tokenizers",
            expected="tokenizers 0.20 or later",
            remedy="pip install tokenizers, or use tokenizer = 'bytes'",
        ) from error
    return tokenizers
