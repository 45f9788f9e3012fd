"""A corpus whose tokens are in a file is that of `load_dataset`, in bounded memory."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from atoll.data import load_dataset, stream_dataset, train_documents
from atoll.data.streamed import _in_pieces
from atoll.data.tokens import PIECE_BYTES, pieces
from atoll.errors import DataError
from tests.patience import PATIENCE_S


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    draw = random.Random(2)
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(60):
        words = draw.choices(["alpha", "beta ", "\n", "é", "12", "..", "  "], k=draw.randrange(400))
        (folder / f"{number:02}.txt").write_text("".join(words), encoding="utf-8")
    for number in (7, 8, 59):
        (folder / f"{number:02}.txt").write_bytes(b"")
    (folder / "30.txt").write_bytes(b"x" * 200_000 + b"\ny\n" + b"ab " * 40_000)
    return f"files:{folder}/*.txt"


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
@pytest.mark.parametrize("held_out", [0.01, 0.3])
@pytest.mark.every(3)
def test_streamed_tokens_and_documents_are_the_same(
    corpus: str, tmp_path: Path, tokenizer: str, held_out: float
) -> None:
    expected = load_dataset(corpus, seed=4, tokenizer=tokenizer, held_out=held_out)
    documents = train_documents(expected, seed=4, held_out=held_out, longest=100)
    found, streamed = stream_dataset(
        corpus, tmp_path / "tokens", seed=4, tokenizer=tokenizer, held_out=held_out, longest=100
    )
    assert torch.equal(found.train, expected.train)
    assert torch.equal(found.held_out.tokens, expected.held_out.tokens)
    assert found.held_out.bytes_per_token == expected.held_out.bytes_per_token
    assert (found.digest, found.to_json()) == (expected.digest, expected.to_json())
    assert np.array_equal(streamed.bounds, documents.bounds)
    assert np.array_equal(streamed.source, documents.source)
    assert (streamed.names, streamed.domains) == (documents.names, documents.domains)
    assert streamed.left_out == documents.left_out


def test_pieces_do_not_depend_on_how_the_text_comes() -> None:
    draw = random.Random(0)
    for text in (
        b"a" * (2 * PIECE_BYTES), b"a" * (PIECE_BYTES + 1), b"\n" * PIECE_BYTES, b"",
        bytes(draw.choices(b"ab\n", k=5 * PIECE_BYTES)),
    ):  # fmt: skip
        size = draw.randrange(1, 2 * PIECE_BYTES)
        parts = [text[start : start + size] for start in range(0, len(text), size)]
        assert list(_in_pieces(parts)) == list(pieces(text))


@pytest.mark.parametrize("more", [b"more", b"more" * 100_000], ids=["little", "much"])
def test_a_text_that_changes_meanwhile_is_refused(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: bytes
) -> None:
    real = Path.stat
    grown = tmp_path / "texts" / "30.txt"

    def stat(self: Path) -> object:
        found = real(self)
        if self == grown:
            with self.open("ab") as file:
                file.write(more)
        return found

    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(DataError, match="changed while"):
        stream_dataset(corpus, tmp_path / "tokens", seed=1)


MEASURE = """
import re, sys, threading
from pathlib import Path
from atoll.data import load_dataset, stream_dataset, train_documents
from atoll.routing.parts import Work
from atoll.routing.reader import reader_of, train_reader

def anonymous():
    text = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\\s+(\\d+)", text)[1]) // 1024

most, over = 0, threading.Event()
def watch():
    global most
    while not over.wait(0.005):
        most = max(most, anonymous())

# Import and train once before: what libraries keep is not counted.
def shard(spec, file, streamed):
    if streamed:
        dataset, documents = stream_dataset(spec, file, seed=0)
    else:
        dataset = load_dataset(spec, seed=0)
        documents = train_documents(dataset, seed=0)
    reader = train_reader(dataset, seed=0, steps=2)
    work = Work(reader_of(reader, tokenizer=dataset.tokenizer), documents, dataset.tokenizer)
    work.name()
    return [work.compute(part) for part, _ in zip(work.parts(), range(2))]

small, large, file, streamed = sys.argv[1:]
shard(small, Path(file), streamed == "yes")
before = anonymous()
watcher = threading.Thread(target=watch)
watcher.start()
shard(large, Path(file), streamed == "yes")
over.set()
watcher.join()
print(most - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is of Linux")
def test_memory_does_not_grow_with_the_corpus(corpus: str, tmp_path: Path) -> None:
    large = tmp_path / "large.txt"
    line = b"all work and no play makes jack a dull boy\n"

    def grown(streamed: str, megabytes: int) -> int:
        large.write_bytes(line * (megabytes * 2**20 // len(line)))
        words = [corpus, f"files:{large}", str(tmp_path / "tokens"), streamed]
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, *words],
            timeout=PATIENCE_S, check=True, capture_output=True, text=True,
        )  # fmt: skip
        return int(done.stdout)

    assert grown("yes", 8) < grown("no", 8) / 4  # some 10 MB and 220, whatever an allocator keeps
