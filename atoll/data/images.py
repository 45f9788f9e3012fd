"""Image classification data: Fashion-MNIST, any idx files, or generated digits.

    fashion-mnist   60,000 and 10,000 pictures of clothes, 28 pixels a side, 10 classes (Xiao and
                    others, https://arxiv.org/abs/1708.07747); Debian: dataset-fashion-mnist
    idx:FOLDER      train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and
                    t10k-labels-idx1-ubyte, plain or .gz, of any square grey images
    segments        drawn digits, see `atoll.data.segments`
    folder:, shards:    pictures in files, see `atoll.data.pictures`

A set brings its own held-out part, so that accuracies can be compared with published ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.data.idx import read_idx
from atoll.data.pictures import FOLDER, SHARDS, Pictures, load_pictures
from atoll.data.segments import draw
from atoll.digest import Digest
from atoll.errors import DataError

FASHION_FOLDER = Path("/usr/share/datasets/fashion-mnist")

_DRAWN, _DRAWN_HELD_OUT = 4096, 1024
_FORMAT = "atoll-images-1"


@dataclass(frozen=True, eq=False)
class Images:
    """Square grey images, uint8 ``(count, image, image)``, and their classes, uint8 ``(count,)``.

    `mean` and `std` are those of all pixels of the *training* images, divided by 255.
    """

    pixels: NDArray[np.uint8]
    labels: NDArray[np.uint8]
    mean: float
    std: float

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def channels(self) -> int:
        """Colours of an image."""
        return 1

    @property
    def side(self) -> int:
        """Pixels of a side."""
        return int(self.pixels.shape[1])

    @cached_property
    def _tensors(self) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self.pixels.copy()), torch.from_numpy(self.labels.copy())

    def batch(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return normalized images, fp32 ``(batch, 1, image, image)``, and classes, int64."""
        pixels, labels = self._tensors
        shares = pixels[chosen].unsqueeze(1).float() / 255.0
        return (shares - self.mean) / self.std, labels[chosen].long()


@dataclass(frozen=True, eq=False)
class ImageDataset:
    """Images to train and evaluate on (disjoint); `digest` is a hash of all the data."""

    corpus: str
    train: Images | Pictures
    held_out: Images | Pictures
    digest: str

    @property
    def classes(self) -> int:
        """Number of classes."""
        return int(max(self.train.labels.max(), self.held_out.labels.max())) + 1

    @property
    def model_options(self) -> Mapping[str, object]:
        """Model options that depend on the images."""
        return {
            "channels": self.train.channels, "image": self.train.side, "classes": self.classes,
        }  # fmt: skip

    def batches(
        self, *, batch: int, limit_tokens: int | None = None, first: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield held-out images and their classes; see :class:`~atoll.data.HeldOutBatches`."""
        count = len(self.held_out)
        wanted = count if limit_tokens is None else min(count, max(1, limit_tokens))
        chosen = torch.arange(wanted) * count // wanted
        for start in range(first * batch, wanted, batch):
            yield self.held_out.batch(chosen[start : start + batch])

    def to_json(self) -> str:
        """Return the normalization of pixels as JSON, published with the weights."""
        about = {"format": _FORMAT, "corpus": self.corpus, **self.model_options}
        return json.dumps({**about, "mean": self.train.mean, "std": self.train.std})


def load_images(spec: str) -> ImageDataset:
    """Load images by the name of their corpus, the same on every member.

    Raises:
        ConfigError: a library is missing.
        DataError: files are missing, damaged, not square or inconsistent.
    """
    if spec == "segments":
        return _dataset(spec, draw(_DRAWN, key=0), draw(_DRAWN_HELD_OUT, key=1))
    kind, _, argument = spec.partition(":")
    if kind in (FOLDER, SHARDS):
        parts = load_pictures(spec)
        return ImageDataset(spec, parts.train, parts.held_out, parts.digest)
    folder = Path(argument).expanduser() if kind == "idx" else FASHION_FOLDER
    if not folder.is_dir():
        raise DataError(
            "the folder of images does not exist",
            given=str(folder),
            expected="idx files in a folder on every machine that trains",
            remedy="check the path"
            if kind == "idx"
            else "apt-get install dataset-fashion-mnist, or corpus = 'idx:FOLDER'",
        )
    train, held_out = _pair(folder, "train"), _pair(folder, "t10k")
    sides = train[0].shape[1], held_out[0].shape[1]
    if sides[0] != sides[1]:
        raise DataError(
            "training and held-out images differ in size",
            given=f"{folder}: {sides[0]} and {sides[1]} pixels a side", expected="equal sizes",
        )  # fmt: skip
    return _dataset(spec, train, held_out)


def _pair(folder: Path, part: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    pixels = read_idx(folder / f"{part}-images-idx3-ubyte", dimensions=3)
    labels = read_idx(folder / f"{part}-labels-idx1-ubyte", dimensions=1)
    count, height, width = pixels.shape
    if count != len(labels) or not count or height != width:
        raise DataError(
            "the numbers of images and labels differ",
            given=f"{folder}, {part}: {count} images of {height} x {width}, {len(labels)} labels",
            expected="square images, and a label for each",
        )
    return pixels, labels


def _dataset(
    spec: str,
    train: tuple[NDArray[np.uint8], NDArray[np.uint8]],
    held_out: tuple[NDArray[np.uint8], NDArray[np.uint8]],
) -> ImageDataset:
    # Computed from integers, so the order of additions does not matter.
    counts = sum(np.bincount(image.ravel(), minlength=256) for image in train[0])
    values = np.arange(256)
    mean = int((counts * values).sum()) / train[0].size
    squares = int((counts * values * values).sum()) / train[0].size
    std = max(1.0, (squares - mean * mean) ** 0.5)
    digest = Digest()
    for array in (*train, *held_out):
        digest.update(repr(array.shape).encode())
        digest.update(array.tobytes())
    mean, std = mean / 255, std / 255
    return ImageDataset(
        spec, Images(*train, mean, std), Images(*held_out, mean, std), digest.hexdigest()
    )
