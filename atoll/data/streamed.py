"""A corpus of any size: its training tokens in a file, made in one pass over the texts.

Tokens, documents and digest are those of `load_dataset` and `train_documents`. In memory there are
a block of text, some numbers per text, and the held-out part, which is small; tokens are mapped
from the file, 2 or 4 bytes each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.data.corpora import Source, find_texts
from atoll.data.dataset import Dataset, HeldOut, digest_of
from atoll.data.documents import LONGEST_PIECE, Documents, Offsets, Texts, documents_at, train_edges
from atoll.data.split import HELD_OUT_CAP_BYTES, Blocks, choose_blocks
from atoll.data.tokens import PIECE_BYTES, Tokenizer, train_tokenizer
from atoll.errors import DataError

_READ_BYTES = 1 << 18


def stream_dataset(
    spec: str,
    file: Path,
    *,
    seed: int,
    tokenizer: str | Tokenizer = "bytes",
    held_out: float = 0.05,
    longest: int = LONGEST_PIECE,
) -> tuple[Dataset, Documents]:
    """Return a dataset whose training tokens are in `file`, and its documents.

    Args:
        spec: See :func:`~atoll.data.load_corpus`.
        file: Is written; it must stay as long as the dataset is used.
        seed: Selects the held-out blocks.
        tokenizer: See :func:`~atoll.data.make_tokenizer`; or an existing one.
        held_out: Share of the text that is held out.
        longest: Most tokens of a document.

    Raises:
        ConfigError: an unknown name or a number out of range.
        DataError: the text is missing, changes meanwhile, or is too small; or the tokenizer does
            not keep every byte.
        OSError: the file cannot be written.
    """
    texts = _Corpus.of(find_texts(spec), seed=seed, held_out=held_out)
    maker = tokenizer
    if isinstance(maker, str):
        maker = train_tokenizer(maker, _in_pieces(texts.read(held_out=False)))
    edges = train_edges(texts.sizes, texts.blocks)
    at = _write(texts, maker, edges, file)
    train = _mapped(file, maker)
    rest = maker.encode(b"".join(texts.read(held_out=True)))
    dataset = Dataset(
        corpus=spec,
        tokenizer=maker,
        train=train,
        held_out=HeldOut(rest, texts.num_held_out / max(1, len(rest))),
        digest=digest_of(train, rest),
    )
    documents = documents_at(at, train, Texts(texts.names, texts.domains, texts.sizes), longest)
    return dataset, documents


@dataclass(frozen=True, slots=True)
class _Corpus:
    """The texts of a corpus and what is held out of them."""

    texts: list[Source]
    sizes: Offsets
    blocks: Blocks

    @classmethod
    def of(cls, texts: list[Source], *, seed: int, held_out: float) -> _Corpus:
        sizes = np.array([text.path.stat().st_size for text in texts], dtype=np.int64)
        total = int(sizes.sum()) + len(texts) - 1
        blocks = choose_blocks(total, share=held_out, seed=seed, cap_bytes=HELD_OUT_CAP_BYTES)
        return cls(texts, sizes, blocks)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(text.name for text in self.texts)

    @property
    def domains(self) -> tuple[str, ...]:
        return tuple(text.domain for text in self.texts)

    @property
    def num_held_out(self) -> int:
        return len(self.blocks.held_out_blocks) * self.blocks.block_bytes

    def read(self, *, held_out: bool) -> Iterator[bytes]:
        """Yield one part of the whole text, in order."""
        chosen = np.zeros(int(self.sizes.sum() + len(self.texts)) // self.blocks.block_bytes + 1,
                          dtype=bool)  # fmt: skip
        chosen[list(self.blocks.held_out_blocks)] = True
        place = 0
        for data in self._whole():
            number = np.arange(place, place + len(data)) // self.blocks.block_bytes
            wanted = chosen[number] == held_out
            place += len(data)
            yield np.frombuffer(data, dtype=np.uint8)[wanted].tobytes()

    def _whole(self) -> Iterator[bytes]:
        """Yield all texts, with a line break between two."""
        for number, (text, size) in enumerate(zip(self.texts, self.sizes, strict=True)):
            if number:
                yield b"\n"
            left = int(size)
            with text.path.open("rb") as file:
                while data := file.read(_READ_BYTES):
                    left -= len(data)
                    if left < 0:
                        break
                    yield data
            if left:
                raise DataError(
                    "a text has changed while it was read", given=str(text.path),
                    expected=f"{size} bytes, as it had before", remedy="run it again",
                )  # fmt: skip


def _in_pieces(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield a text in the pieces of :func:`~atoll.data.tokens.pieces`."""
    buffer = bytearray()
    for part in parts:
        buffer += part
        while len(buffer) > PIECE_BYTES:
            cut = buffer.rfind(b"\n", 0, PIECE_BYTES) + 1 or PIECE_BYTES
            yield bytes(buffer[:cut])
            del buffer[:cut]
    if buffer:
        yield bytes(buffer)


def _write(texts: _Corpus, maker: Tokenizer, edges: Offsets, file: Path) -> Offsets:
    """Write all training tokens; return the first token that begins at or after each edge."""
    sizes = _token_sizes(maker)
    at = np.zeros(len(edges), dtype=np.int64)
    place = tokens = known = 0
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as out:
        for piece in _in_pieces(texts.read(held_out=False)):
            ids = maker.encode(piece).numpy()
            out.write(ids.tobytes())
            ends = sizes[ids.astype(np.int64)].cumsum()
            if (int(ends[-1]) if len(ends) else 0) != len(piece):
                raise DataError(
                    "documents cannot be found in these tokens",
                    given=f"a piece of {len(piece)} bytes, tokens of {int(ends[-1:].sum())}",
                    expected="a tokenizer that keeps every byte",
                    remedy='tokenizer = "bytes" or "bpe:SIZE" in [data]',
                )
            upto = int(np.searchsorted(edges, place + len(piece)))
            starts = ends - sizes[ids.astype(np.int64)]
            at[known:upto] = tokens + np.searchsorted(starts, edges[known:upto] - place)
            known, place, tokens = upto, place + len(piece), tokens + len(ids)
    at[known:] = tokens
    return at


def _token_sizes(maker: Tokenizer) -> NDArray[np.int64]:
    each = (len(maker.decode(torch.tensor([number]))) for number in range(maker.vocab_size))
    return np.fromiter(each, dtype=np.int64, count=maker.vocab_size)


def _mapped(file: Path, maker: Tokenizer) -> Tensor:
    kind = maker.encode(b"").numpy().dtype
    if not file.stat().st_size:
        return torch.from_numpy(np.empty(0, dtype=kind))
    return torch.from_numpy(np.memmap(file, dtype=kind, mode="r+"))
