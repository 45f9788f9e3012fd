"""Features of many documents in parts, each stored as soon as it is computed.

A part is a range of documents, named by its bounds. Here it is a file; on a hub it is an item of a
queue (`together.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from atoll.data import Documents, Tokenizer
from atoll.data.dataset import update_with
from atoll.digest import Digest
from atoll.routing.features import FeatureModel, Features

SIZE = 512
"""Documents of a part: seconds of work for a small model."""


@dataclass(frozen=True, slots=True)
class Work:
    """Features to be computed, and what identifies them.

    Attributes:
        reader: The small model.
        documents: All documents.
        tokenizer: Of the documents.
        size: Documents of a part.
    """

    reader: FeatureModel
    documents: Documents
    tokenizer: Tokenizer
    size: int = SIZE

    def parts(self) -> Iterator[range]:
        """Yield the documents of each part."""
        count = len(self.documents)
        return (range(a, min(a + self.size, count)) for a in range(0, count, self.size))

    def compute(self, part: range) -> Features:
        """Return the features of a part, the same on every member."""
        return self.reader.prefixes(self.documents, part, self.tokenizer)

    def name(self) -> str:
        """Return a hash of the small model, the documents and the parts: other work, other name."""
        digest = Digest()
        digest.update(f"{self.size} {self.reader.prefix} {self.tokenizer.to_json()}".encode())
        digest.update(self.documents.bounds.tobytes())
        update_with(digest, self.documents.tokens)
        for name, value in sorted(self.reader.model.state_dict().items()):
            digest.update(name.encode() + value.cpu().numpy().tobytes())
        return digest.hexdigest()


def part_name(part: range) -> str:
    """Return the name of a part, e.g. ``512-1024``."""
    return f"{part.start}-{part.stop}"


def features_in(
    folder: Path, work: Work, *, progress: Callable[[int, int], bool] = lambda done, parts: True
) -> Features | None:
    """Compute all features; parts that `folder` already has are read instead.

    Args:
        folder: Of the parts, made if missing. Parts of other work are left alone.
        work: What to compute.
        progress: Called after each part with the number of finished and of all parts; False stops.

    Returns:
        Features ``(documents, width)``, or None if `progress` stopped it.
    """
    own = folder / work.name()
    own.mkdir(parents=True, exist_ok=True)
    parts = list(work.parts())
    found = []
    for number, part in enumerate(parts, start=1):
        file = own / f"{part_name(part)}.safetensors"
        features = _read(file, len(part))
        if features is None:
            features = work.compute(part)
            unfinished = file.with_suffix(".unfinished")
            save_file({"features": features}, unfinished)
            unfinished.replace(file)
        found.append(features)
        if not progress(number, len(parts)) and number < len(parts):
            return None
    return np.concatenate(found)


def _read(file: Path, documents: int) -> Features | None:
    """Return a part's features, or None if they are not there or damaged."""
    try:
        features: Features = load_file(file)["features"]
    except (OSError, SafetensorError, KeyError):
        return None
    return features if len(features) == documents else None
