"""Tokenizers: plain bytes, or a byte-pair encoding trained on the text.

Both are lossless on any bytes. Those of pretrained models, which may not be, are in
`atoll.data.pretrained`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
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
"""Value of a saved tokenizer's format field."""


# Merges never cross these pieces: a word with the space before it, a number, a run of signs, a run
# of white space. Bytes from 0x80 on count as letters, so that words in UTF-8 stay whole.
_PIECES = r" ?[A-Za-z_\x{80}-\x{FF}]+| ?[0-9]+| ?[^\sA-Za-z_0-9\x{80}-\x{FF}]+|\s+"
_ENCODE_PIECE_BYTES = 1 << 16


class Tokenizer(Protocol):
    """Converts bytes to token ids and back.

    ``decode(encode(data)) == data`` for every ``data``, except for pretrained ones.
    """

    @property
    def name(self) -> str:
        """Its spec, e.g. ``"bytes"`` or ``"bpe:4096"``."""

    @property
    def vocab_size(self) -> int:
        """Number of distinct ids; ids are 0 to this less one."""

    def encode(self, data: bytes) -> Tensor:
        """Return the ids, 1-D, uint16 where they fit, else int32."""

    def decode(self, ids: Tensor) -> bytes:
        """Return the bytes of 1-D integer ids."""

    def to_json(self) -> str:
        """Return everything :func:`tokenizer_from_json` needs to build it again."""


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
        """Return its name; there is nothing else to keep."""
        return json.dumps({"format": FORMAT, "name": self.name})


class BytePairTokenizer:
    """Byte-pair encoding over raw bytes, on the `tokenizers` library.

    The library works on text. Each byte is passed as the character of the same number (Latin-1), so
    invalid UTF-8 is preserved.
    """

    def __init__(self, inner: HuggingFaceTokenizer) -> None:
        """Wrap a trained tokenizer whose characters are bytes."""
        self._inner = inner
        self.vocab_size: int = inner.get_vocab_size()
        self.name = f"bpe:{self.vocab_size}"
        self._pieces = [b""] * self.vocab_size
        for piece, index in inner.get_vocab().items():
            self._pieces[index] = piece.encode("latin-1")

    def encode(self, data: bytes) -> Tensor:
        """Return the ids, uint16 up to 65,536 of them, else int32."""
        kind = np.uint16 if self.vocab_size <= LARGEST_UINT16 else np.int32
        encoded = self._inner.encode_batch_fast(list(_pieces(data)), add_special_tokens=False)
        parts = [np.array(part.ids, dtype=kind) for part in encoded]
        return torch.from_numpy(np.concatenate(parts) if parts else np.empty(0, dtype=kind))

    def decode(self, ids: Tensor) -> bytes:
        """Return the pieces that the ids stand for, joined."""
        return b"".join(self._pieces[index] for index in ids.tolist())

    def to_json(self) -> str:
        """Return the vocabulary and its merges."""
        inner = json.loads(self._inner.to_str())
        return json.dumps({"format": FORMAT, "name": self.name, "bpe": inner})


def make_tokenizer(spec: str, *, text: bytes | None = None) -> Tokenizer:
    """Return the tokenizer that ``spec`` names, training it if needed.

    Args:
        spec: ``"bytes"``, or ``"bpe:"`` and a vocabulary size, e.g. ``"bpe:4096"``.
        text: Training text of a byte-pair encoding; never held-out text.

    Raises:
        ConfigError: no such tokenizer, a size out of range, or a library is missing.
        DataError: the text is too small for so many tokens; both numbers are named.
    """
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
    return _trained(int(size), text or b"")


def tokenizer_from_json(text: str) -> Tokenizer:
    """Return the tokenizer that :meth:`Tokenizer.to_json` wrote.

    Raises:
        DataError: the text is no tokenizer of this format.
        ConfigError: a library it needs is missing.
    """
    try:
        fields: dict[str, Any] = json.loads(text)
        if fields["format"] == FORMAT and fields["name"] == "bytes":
            return ByteTokenizer()
        if "pretrained" in fields:
            from atoll.data.pretrained import PretrainedTokenizer

            return PretrainedTokenizer(tokenizers_from(json.dumps(fields["pretrained"])))
        inner = json.dumps(fields["bpe"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            "this is no saved tokenizer", given=f"{text[:60]!r}", expected=f"JSON of {FORMAT}"
        ) from error
    return BytePairTokenizer(tokenizers_from(inner))


def tokenizers_from(text: str) -> HuggingFaceTokenizer:
    """Return the library's tokenizer that its own JSON describes.

    Raises:
        ConfigError: the library is missing.
    """
    made: HuggingFaceTokenizer = _library().Tokenizer.from_str(text)
    return made


def _trained(size: int, text: bytes) -> BytePairTokenizer:
    library = _library()
    inner = library.Tokenizer(library.models.BPE())
    inner.pre_tokenizer = library.pre_tokenizers.Split(
        library.Regex(_PIECES), behavior="isolated", invert=False
    )
    alphabet = [chr(value) for value in range(256)]
    trainer = library.trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    inner.train_from_iterator(_pieces(text), trainer=trainer)
    if inner.get_vocab_size() < size:
        raise DataError(
            "the text is too small for this tokenizer",
            given=f"{len(text)} bytes, which make {inner.get_vocab_size()} tokens",
            expected=f"enough for {size} tokens",
            remedy=f"more text, or bpe:{max(SMALLEST_BPE, inner.get_vocab_size())} or less",
        )
    return BytePairTokenizer(inner)


def _pieces(data: bytes) -> Iterator[str]:
    """Yield the data as Latin-1."""
    return (piece.decode("latin-1") for piece in pieces(data))


def pieces(data: bytes) -> Iterator[bytes]:
    """Yield the data, cut after line breaks: the library is slow on one huge string."""
    start = 0
    while start < len(data):
        end = min(start + _ENCODE_PIECE_BYTES, len(data))
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
