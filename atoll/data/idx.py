"""The idx format of MNIST: 2 zero bytes, dtype, number of dimensions, sizes, data.

The dtype is 8 (unsigned bytes); each size has 4 bytes, big-endian.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from atoll.errors import DataError

_UNSIGNED_BYTES = 8


def read_idx(path: Path, *, dimensions: int) -> NDArray[np.uint8]:
    """Return the array in `path` or `path` with .gz; raises DataError.

    `dimensions` is 3 for images (count, height, width) and 1 for labels.
    """
    data = _bytes_of(path)
    start = 4 + 4 * dimensions
    shape = tuple(int.from_bytes(data[at : at + 4], "big") for at in range(4, start, 4))
    head = bytes((0, 0, _UNSIGNED_BYTES, dimensions))
    if data[:4] != head or len(data) != start + math.prod(shape):
        raise DataError(
            "this is not a complete idx file",
            given=f"{path}: {len(data)} bytes that begin with {data[:4].hex(' ')}",
            expected=f"{head.hex(' ')}, {dimensions} sizes and as many bytes as these give",
            remedy="copy the file again",
        )
    return np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape)


def _bytes_of(path: Path) -> bytes:
    packed = path.with_name(path.name + ".gz")
    try:
        if path.exists():
            return path.read_bytes()
        return gzip.decompress(packed.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            "images cannot be read", given=f"{path} or {packed.name} ({error})",
            expected="an idx file, plain or packed with gzip",
        ) from error  # fmt: skip
