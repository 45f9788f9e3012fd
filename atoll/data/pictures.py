"""Pictures in files, decoded when a batch needs them: folders of classes, and shards in tar files.

    folder:FOLDER       one folder per class; with `train` and `val`, `valid` or `test` below FOLDER
                        these are the two parts
    shards:GLOB         .tar files of WebDataset's form (https://github.com/webdataset/webdataset):
                        `KEY.jpg` (or .jpeg, .png, .webp, .bmp) and `KEY.cls`, its class as a number

Both may end with `@PIXELS`: the side to which pictures are cropped and scaled, 32 without it. Only
names, places and classes are in memory. Where there is no part to evaluate with, one picture in
twenty is held out, chosen by the hash of its name.
"""

from __future__ import annotations

import glob
import hashlib
import io
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.digest import Digest
from atoll.errors import ConfigError, DataError

FOLDER, SHARDS = "folder", "shards"
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
HELD_OUT_FOLDERS = ("val", "valid", "test")
SIDE = 32
_HELD_OUT = 20
"""One picture of so many is held out where there is no part to evaluate with."""
_CLASS_BYTES = 32
_MEASURED = 256
"""Most pictures from which mean and standard deviation are computed."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a picture is: a file, and in a tar file the first byte and the number of bytes."""

    name: str
    file: Path
    start: int = 0
    nbytes: int = -1

    def read(self) -> bytes:
        """Return the picture's bytes."""
        with self.file.open("rb") as file:
            file.seek(self.start)
            return file.read(self.nbytes)


@dataclass(frozen=True, eq=False)
class Pictures:
    """Colour pictures with their classes; see :class:`~atoll.data.images.Images`."""

    places: Sequence[Place]
    labels: NDArray[np.int64]
    side: int
    mean: float = 0.5
    std: float = 0.5

    def __len__(self) -> int:
        return len(self.places)

    @property
    def channels(self) -> int:
        """Colours of a picture."""
        return 3

    @cached_property
    def _classes(self) -> Tensor:
        return torch.from_numpy(self.labels)

    def batch(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return normalized pictures, fp32 ``(batch, 3, side, side)``, and classes, int64."""
        pixels = np.stack([self.decoded(int(one)) for one in chosen])
        shares = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255.0
        return (shares - self.mean) / self.std, self._classes[chosen]

    def decoded(self, number: int) -> NDArray[np.uint8]:
        """Return one picture, uint8 ``(side, side, 3)``: its middle, scaled.

        Raises:
            DataError: it cannot be read; the file is named.
        """
        pillow, place = _pillow(), self.places[number]
        try:
            with pillow.Image.open(io.BytesIO(place.read())) as opened:
                picture = opened.convert("RGB")
        except (
            OSError, ValueError, SyntaxError,  # a SyntaxError is a PNG file with a broken chunk
            pillow.Image.DecompressionBombError,
        ) as error:  # fmt: skip
            raise DataError(
                "a picture cannot be read", given=f"{place.name}: {error}",
                expected="a picture in one of " + ", ".join(SUFFIXES),
            ) from error  # fmt: skip
        return np.asarray(pillow.ImageOps.fit(picture, (self.side, self.side)), dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class PictureParts:
    """Pictures to train on, others to evaluate with, and a hash of names, sizes and classes."""

    train: Pictures
    held_out: Pictures
    digest: str


@dataclass(slots=True)
class _Found:
    """Pictures as they are found."""

    places: list[Place] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)

    def add(self, place: Place, label: int) -> None:
        self.places.append(place)
        self.labels.append(label)


def load_pictures(spec: str) -> PictureParts:
    """Find the pictures of `folder:FOLDER@PIXELS` or `shards:GLOB@PIXELS`; decodes a few of them.

    Raises:
        ConfigError: Pillow is not installed, or PIXELS is no number.
        DataError: there are none, or a shard lacks a class.
    """
    _pillow()
    kind, _, argument = spec.partition(":")
    where, at, pixels = argument.rpartition("@")
    if not at:
        where, pixels = argument, str(SIDE)
    if not (pixels.isascii() and pixels.isdigit() and int(pixels) > 0):
        raise ConfigError(
            "the side of pictures is no number of pixels", given=spec,
            expected=f"e.g. {kind}:{where}@64",
        )  # fmt: skip
    side = int(pixels)
    train, held_out = _in_folders(where) if kind == FOLDER else _in_shards(where)
    for part, found in (("train on", train), ("evaluate with", held_out)):
        if not found.places:
            raise DataError(
                f"there are no pictures to {part}", given=where,
                expected="folders named as their classes, of " + ", ".join(SUFFIXES)
                if kind == FOLDER else "tar files with KEY.jpg and KEY.cls",
            )  # fmt: skip
    digest = Digest()
    for found in (train, held_out):
        for place, label in zip(found.places, found.labels, strict=True):
            digest.update(f"{place.name}\0{place.nbytes}\0{label}\n".encode())
    plain = _pictures(train, side)
    chosen = np.arange(min(_MEASURED, len(plain))) * len(plain) // min(_MEASURED, len(plain))
    values = np.stack([plain.decoded(int(one)) for one in chosen]).astype(np.int64)
    mean = int(values.sum()) / values.size
    std = max(1.0, (int((values * values).sum()) / values.size - mean * mean) ** 0.5)
    as_measured = {"mean": mean / 255, "std": std / 255}
    return PictureParts(
        replace(plain, **as_measured), replace(_pictures(held_out, side), **as_measured),
        digest.hexdigest(),
    )  # fmt: skip


def _pictures(found: _Found, side: int) -> Pictures:
    return Pictures(found.places, np.array(found.labels, dtype=np.int64), side)


def _in_folders(where: str) -> tuple[_Found, _Found]:
    """Return the pictures of a folder of classes: to train on, and held out."""
    root = Path(where).expanduser()
    parts = [name for name in HELD_OUT_FOLDERS if (root / name).is_dir()]
    split = (root / "train").is_dir() and parts
    top = root / "train" if split else root
    classes = sorted(one.name for one in top.iterdir() if one.is_dir()) if top.is_dir() else []
    train, held_out = _Found(), _Found()
    for label, name in enumerate(classes):
        for file in _files(top / name):
            place = _place(file, root)
            (held_out if not split and _is_held_out(place.name) else train).add(place, label)
        if split:
            for file in _files(root / parts[0] / name):
                held_out.add(_place(file, root), label)
    return train, held_out


def _files(folder: Path) -> Iterator[Path]:
    yield from sorted(file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES)


def _place(file: Path, root: Path) -> Place:
    return Place(file.relative_to(root).as_posix(), file, 0, file.stat().st_size)


def _in_shards(where: str) -> tuple[_Found, _Found]:
    """Return the pictures of tar files, whose headers alone are read, and the classes."""
    train, held_out = _Found(), _Found()
    for file in sorted(map(Path, glob.glob(str(Path(where).expanduser()), recursive=True))):
        pictures: dict[str, Place] = {}
        classes: dict[str, int] = {}
        try:
            with tarfile.open(file, "r:") as opened:
                for member in opened:
                    key, _, suffix = member.name.rpartition(".")
                    if not member.isreg() or member.issparse():
                        continue  # a sparse one of some bytes may say that it is a terabyte
                    if f".{suffix.lower()}" in SUFFIXES:
                        name = f"{file.name}/{member.name}"
                        pictures[key] = Place(name, file, member.offset_data, member.size)
                    elif suffix == "cls" and (inside := opened.extractfile(member)):
                        classes[key] = int(inside.read(_CLASS_BYTES))
                        if classes[key] < 0:
                            raise ValueError(f"class {classes[key]} of {member.name}")
        except (tarfile.TarError, OSError, ValueError) as error:
            raise DataError(
                "a shard cannot be read", given=f"{file}: {error}",
                expected="a plain .tar file; classes as numbers from 0",
            ) from error  # fmt: skip
        for key, place in pictures.items():
            if key not in classes:
                raise DataError("a picture has no class", given=place.name, expected=f"{key}.cls")
            (held_out if _is_held_out(place.name) else train).add(place, classes[key])
    return train, held_out


def _is_held_out(name: str) -> bool:
    return hashlib.blake2b(name.encode(), digest_size=8).digest()[0] % _HELD_OUT == 0


def _pillow() -> Any:
    try:
        import PIL
        import PIL.Image
        import PIL.ImageOps
    except ImportError as error:
        raise ConfigError(
            "reading pictures needs a library that is not installed", given=str(error),
            expected="pillow 10 or later", remedy="pip install pillow",
        ) from error  # fmt: skip
    return PIL
