"""Pictures in folders and tar files: decoded on demand, the same bits in every process."""

from __future__ import annotations

import io
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from atoll.config import read_spec
from atoll.data import BatchStream, Cursor, ImageShards, load_images
from atoll.data.pictures import SIDE
from atoll.errors import ConfigError, DataError
from atoll.group.single import SingleGroup
from tests.train.members import train_member

Image: Any = pytest.importorskip("PIL.Image", reason="pip install pillow")
CLASSES = ("apples", "pears", "plums")


def picture(number: int) -> bytes:
    """Return a PNG, 40 x 30, whose colour says its class."""
    source = np.random.default_rng(number)
    pixels = source.integers(0, 60, (30, 40, 3)).astype(np.uint8)
    pixels[:, :, number % 3] += 150
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pictures")
    for number in range(120):
        file = root / CLASSES[number % 3] / f"{number:03}.png"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(picture(number))
    return root


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shards")
    for part in range(3):
        with tarfile.open(root / f"data-{part}.tar", "w") as file:
            for number in range(40 * part, 40 * part + 40):
                for suffix, data in (("png", picture(number)), ("cls", str(number % 3).encode())):
                    about = tarfile.TarInfo(f"{number:03}.{suffix}")
                    about.size = len(data)
                    file.addfile(about, io.BytesIO(data))
    return root


def test_folders_are_classes(folder: Path) -> None:
    data = load_images(f"folder:{folder}@24")
    assert data.model_options == {"channels": 3, "image": 24, "classes": 3}
    assert len(data.train) + len(data.held_out) == 120
    assert 1 <= len(data.held_out) <= 20
    images, classes = data.train.batch(torch.arange(len(data.train)))
    assert images.shape == (len(data.train), 3, 24, 24)
    assert abs(images.mean().item()) < 0.05
    assert torch.equal(images.mean((2, 3)).argmax(1), classes)
    assert load_images(f"folder:{folder}").train.side == SIDE


def test_parts_of_their_own_are_kept_apart(folder: Path, tmp_path: Path) -> None:
    for part, numbers in (("train", range(12)), ("val", range(12, 18))):
        for number in numbers:
            file = tmp_path / part / CLASSES[number % 3] / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(picture(number))
    data = load_images(f"folder:{tmp_path}")
    assert (len(data.train), len(data.held_out)) == (12, 6)
    assert {place.name.partition("/")[0] for place in data.held_out.places} == {"val"}  # type: ignore[union-attr]


def test_shards_hold_what_folders_hold(folder: Path, shards: Path) -> None:
    data = load_images(f"shards:{shards}/*.tar@24")
    assert data.model_options == {"channels": 3, "image": 24, "classes": 3}
    images, classes = data.train.batch(torch.arange(len(data.train)))
    assert torch.equal(images.mean((2, 3)).argmax(1), classes)
    known = {
        (folder / CLASSES[n % 3] / f"{n:03}.png").read_bytes() for n in range(120)
    }  # fmt: skip
    places = [*data.train.places, *data.held_out.places]  # type: ignore[union-attr]
    assert {place.read() for place in places} == known


@pytest.mark.parametrize("kind", ["folder", "shards"])
def test_a_stream_goes_on_with_the_very_next_picture(folder: Path, shards: Path, kind: str) -> None:
    spec = f"folder:{folder}@16" if kind == "folder" else f"shards:{shards}/*.tar@16"

    def stream(cursor: Cursor | None = None) -> BatchStream:
        dealt = ImageShards(load_images(spec).train, slots=2, seed=7)
        return BatchStream(dealt, slot=1, batch=5, cursor=cursor)

    whole, first = stream(), stream()
    wanted = [next(whole) for _ in range(30)]  # more than a pass
    for _ in range(7):
        next(first)
    again = stream(Cursor.from_dict(first.cursor.to_dict()))
    for images, classes in wanted[7:]:
        other, theirs = next(again)
        assert torch.equal(images, other)
        assert torch.equal(classes, theirs)


def test_what_cannot_be_used_is_named(folder: Path, tmp_path: Path) -> None:
    for spec, kind, why in (
        (f"folder:{folder}@big", ConfigError, "no number of pixels"),
        (f"folder:{tmp_path}/none", DataError, "no pictures to train on"),
        (f"shards:{tmp_path}/*.tar", DataError, "no pictures to train on"),
    ):
        with pytest.raises(kind, match=why):
            load_images(spec)
    (tmp_path / "a.tar").write_bytes(b"no tar" * 200)
    with pytest.raises(DataError, match=r"a shard cannot be read.*a\.tar"):
        load_images(f"shards:{tmp_path}/a.tar")
    with tarfile.open(tmp_path / "b.tar", "w") as file:
        about = tarfile.TarInfo("x.png")
        about.size = 4
        file.addfile(about, io.BytesIO(b"1234"))
    with pytest.raises(DataError, match="a picture has no class"):
        load_images(f"shards:{tmp_path}/b.tar")
    with tarfile.open(tmp_path / "c.tar", "w") as file:
        about = tarfile.TarInfo("x.cls")
        about.size = 2
        file.addfile(about, io.BytesIO(b"-1"))
    with pytest.raises(DataError, match=r"class -1 of x\.cls"):
        load_images(f"shards:{tmp_path}/c.tar")


def test_a_picture_with_a_broken_chunk_is_named(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (200, 200, 3), dtype=np.uint8)
    packed = io.BytesIO()
    Image.fromarray(noise).save(packed, "PNG")
    head, data, second = packed.getvalue().split(b"IDAT", 2)
    broken = head + b"IDAT" + data + b"\x01\x02\x03\x04" + second
    for number in range(120):
        file = tmp_path / "plums" / f"{number}.png"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(broken)
    with pytest.raises(DataError, match=r"a picture cannot be read.*broken PNG"):
        load_images(f"folder:{tmp_path}")


def test_bombs_in_pictures_and_shards_are_named(folder: Path, tmp_path: Path) -> None:
    """A picture of 100 bytes may say that it has 10^10 points, a file in a tar that it is a TB."""
    size = b"IHDR" + (100_000).to_bytes(4, "big") * 2 + b"\x08\x02\x00\x00\x00"
    bomb = b"\x89PNG\r\n\x1a\n\x00\x00\x00\x0d" + size + zlib.crc32(size).to_bytes(4, "big")
    bomb += b"\0\0\0\0IDAT" + zlib.crc32(b"IDAT").to_bytes(4, "big")
    for number in range(120):
        file = tmp_path / "bombs" / "plums" / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bomb)
    with pytest.raises(DataError, match=r"a picture cannot be read.*\.png.*bomb"):
        load_images(f"folder:{tmp_path}/bombs")
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as shard:
        for name in ("x.png", "x.cls"):
            about = tarfile.TarInfo(name)
            about.pax_headers = {
                "GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.name": name,
                "GNU.sparse.size": str(1 << 40), "GNU.sparse.numblocks": "0",
                "GNU.sparse.map": "0,0",
            }  # fmt: skip
            shard.addfile(about)
    with pytest.raises(DataError, match="no pictures"):
        load_images(f"shards:{tmp_path}/a.tar")


def test_a_classifier_learns_from_folders(folder: Path, tmp_path: Path) -> None:
    spec = read_spec({
        "job": {"nodes": 1, "threads": 1},
        "model": {"name": "resnet", "width": 8, "blocks": 1},
        "data": {"corpus": f"folder:{folder}@16"},
        "train": {"steps": 12, "batch": 16, "lr": 0.01, "warmup": 1},
        "strategy": {"preset": "alone"},
    })  # fmt: skip
    result = train_member(spec, SingleGroup(), tmp_path)
    assert result["accuracy"] == 1.0
