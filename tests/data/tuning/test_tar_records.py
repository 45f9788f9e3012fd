"""Shards of WebDataset's form are examples like those of any other file; pictures are refused."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from atoll.data import BatchStream, Cursor
from atoll.data.tuning.dataset import ExampleSet, ExampleShards, load_examples
from atoll.data.tuning.options import ExampleOptions
from atoll.data.tuning.records import find_files, read_records
from atoll.errors import DataError
from tests.models.tiny import count_chat, save_tiny, tiny_tokenizer

transformers = pytest.importorskip("transformers", reason="pip install 'atoll[hf]'")

CHATS = [count_chat(number) for number in range(60)]


def shard(file: Path, files: Mapping[str, bytes], *, mode: str = "w") -> Path:
    """Write a tar file."""
    with tarfile.open(file, mode) as out:  # type: ignore[call-overload]
        for name, data in files.items():
            about = tarfile.TarInfo(name)
            about.size = len(data)
            out.addfile(about, io.BytesIO(data))
    return file


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_tokenizer(save_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("shards")
    for part in range(3):
        chats = enumerate(CHATS[20 * part : 20 * part + 20], start=20 * part)
        files = {f"chats/{number:04}.json": json.dumps(chat).encode() for number, chat in chats}
        shard(folder / f"part-{part}.tar", files)
    return f"{folder}/*.tar"


def load(tokenizer: Any, data: str) -> ExampleSet:
    return load_examples(ExampleOptions(data=[data], context=64, seed=3, held_out=0.1), tokenizer)


def test_files_whose_names_begin_alike_are_one_record(tmp_path: Path) -> None:
    files = {
        "a/7.prompt.txt": b"1 + 1 =", "a/._7.completion.txt": b"\0", "a/._7.jpg": b"\0",
        "a/7.completion.txt": " 2, ü".encode(), "a/7.cls": b"1\n",
        "a/8.json": b'{"question": "b?", "answer": "c"}', "a/8.unknown": b"\xff",
        "b/8.txt": b"another folder", "b/.hidden.txt": b"no record",
    }  # fmt: skip
    expected = [
        {"prompt": "1 + 1 =", "completion": " 2, ü", "label": 1},
        {"question": "b?", "answer": "c"}, {"text": "another folder"},
    ]  # fmt: skip
    for name, mode in (
        ("a.tar", "w"),
        ("a.tar.gz", "w:gz"),
        ("a.tgz", "w:gz"),
        ("a.tar.xz", "w:xz"),
    ):
        file = shard(tmp_path / name, files, mode=mode)
        assert find_files([str(file)]) == [[file]]
        assert list(read_records(file)) == expected


def test_shards_are_the_same_examples_as_lines(tokenizer: Any, shards: str, tmp_path: Path) -> None:
    lines = tmp_path / "chats.jsonl"
    lines.write_text("".join(json.dumps(chat) + "\n" for chat in CHATS), encoding="utf-8")
    packed = tmp_path / "chats.jsonl.gz"
    packed.write_bytes(gzip.compress(lines.read_bytes()))
    digests = {load(tokenizer, one).digest for one in (shards, str(lines), str(packed))}
    assert len(digests) == 1


def test_shards_are_dealt_once_and_go_on_bit_for_bit(tokenizer: Any, shards: str) -> None:
    def dealt() -> ExampleShards:
        return ExampleShards(load(tokenizer, shards).train, slots=2, seed=7)

    dataset = dealt()
    seen = [
        {tuple(row.tolist()) for number in range(dataset.num_windows(slot))
         for row in dataset.batch(slot, np.array([number]))[0][:, 0]} for slot in (0, 1)
    ]  # fmt: skip
    assert not seen[0] & seen[1]
    assert len(seen[0] | seen[1]) == len(load(tokenizer, shards).train)
    first = BatchStream(dealt(), slot=1, batch=3)
    for _ in range(5):  # beyond the first pass
        next(first)
    saved = json.loads(json.dumps(first.cursor.to_dict()))
    again = BatchStream(dealt(), slot=1, batch=3, cursor=Cursor.from_dict(saved))
    for _ in range(6):
        assert all(map(torch.equal, next(first), next(again)))


def test_shards_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    whole = shard(tmp_path / "a.tar.gz", {"1.txt": bytes(range(32, 90)) * 99}, mode="w:gz")
    (tmp_path / "cut.tar.gz").write_bytes(whole.read_bytes()[:60])
    (tmp_path / "none.tar").write_bytes(b"no tar" * 200)
    shard(tmp_path / "json.tar", {"1.json": b"{"})
    shard(tmp_path / "bytes.tar", {"1.txt": b"\xff\xfe"})
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 99)[:30])
    for name in ("cut.tar.gz", "none.tar", "json.tar", "bytes.tar"):
        with pytest.raises(DataError, match=rf"a shard cannot be read.*{name}"):
            list(read_records(tmp_path / name))
    with pytest.raises(DataError, match=r"a file of the data cannot be read.*cut\.jsonl"):
        list(read_records(tmp_path / "cut.jsonl.gz"))


def test_pictures_are_refused_with_what_trains_on_them(tmp_path: Path) -> None:
    picture = tmp_path / "folder" / "apples" / "1.JPG"
    picture.parent.mkdir(parents=True)
    picture.write_bytes(b"JPG")
    mixed = shard(tmp_path / "captions.tar", {"1.txt": b"an apple", "1.jpg": b"JPG"})
    for entry in (str(picture.parents[1]), str(picture), f"folder:{picture.parents[1]}@64",
                  f"shards:{tmp_path}/*.tar"):  # fmt: skip
        with pytest.raises(DataError, match="read text") as caught:
            find_files([entry])
        assert 'corpus = "' in str(caught.value.remedy)
    with pytest.raises(DataError, match=r"read text.*1\.jpg") as caught:
        list(read_records(mixed))
    assert "shards:GLOB" in str(caught.value.remedy)


def test_a_folder_of_examples_says_how_to_name_them(tmp_path: Path) -> None:
    shard(tmp_path / "1.tar", {"1.txt": b"a"})
    with pytest.raises(DataError, match="no file matches") as caught:
        find_files([str(tmp_path)])
    assert str(caught.value.remedy).endswith("/**/*.tar")
