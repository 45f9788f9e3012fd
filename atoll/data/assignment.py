"""Which documents of a corpus belong to which path of a modular model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from atoll.errors import DataError

NO_PATH = -1
"""In `Assignment.paths`: this document has no further path."""


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """Documents of the training tokens, and the paths that train on each of them.

    Attributes:
        bounds: Positions in the training tokens, int64 ``(documents + 1,)``; document `d` is
            ``tokens[bounds[d] : bounds[d + 1]]``.
        paths: The paths of each document, nearest first, int32 ``(documents, copies)``;
            ``NO_PATH`` where there are fewer.
        num_paths: Paths of the model; some may have no document.
        data: Digest of the dataset that was assigned; empty: not known.
    """

    bounds: NDArray[np.int64]
    paths: NDArray[np.int32]
    num_paths: int
    data: str = ""

    def __post_init__(self) -> None:
        """Raise DataError unless bounds rise, and each document has a first path that exists."""
        right = (
            self.bounds.ndim == 1
            and self.paths.ndim == 2
            and self.paths.shape[1] >= 1
            and len(self.bounds) == len(self.paths) + 1
            and self.bounds[0] >= 0
            and bool((np.diff(self.bounds) >= 0).all())
            and bool((self.paths[:, 0] > NO_PATH).all())
            and bool(((self.paths >= NO_PATH) & (self.paths < self.num_paths)).all())
        )
        if not right:
            raise DataError(
                "an assignment of documents to paths is inconsistent",
                given=f"bounds {self.bounds.shape}, paths {self.paths.shape}",
                expected=f"rising bounds, and a path from 0 to {self.num_paths - 1} of each",
            )

    def documents(self, path: int) -> NDArray[np.int64]:
        """Return the numbers of a path's documents, rising."""
        return np.flatnonzero((self.paths == path).any(axis=1))

    def tokens(self) -> NDArray[np.int64]:
        """Return the tokens of each path, int64 ``(num_paths,)``; shared documents count twice."""
        lengths = np.diff(self.bounds)
        return np.array([lengths[self.documents(path)].sum() for path in range(self.num_paths)])

    def write(self, file: Path, *, about: dict[str, str]) -> None:
        """Write a file; `about` are further metadata, e.g. the modules of the model."""
        tensors: dict[str, NDArray[Any]] = {"bounds": self.bounds, "paths": self.paths}
        own = {"num_paths": str(self.num_paths), "data": self.data}
        file.write_bytes(save(tensors, metadata={**about, **own}))


def read_assignment(file: Path) -> Assignment:
    """Read a file of :meth:`Assignment.write`.

    Raises:
        DataError: it is missing or damaged, or is another kind of file.
    """
    try:
        with safe_open(file, framework="numpy") as opened:
            about = dict(opened.metadata() or {})
            bounds, paths = opened.get_tensor("bounds"), opened.get_tensor("paths")
        count = int(about["num_paths"])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise DataError("an assignment cannot be read", given=str(file)) from error
    return Assignment(bounds, paths, count, about.get("data", ""))
