"""A trained modular model on disk, as training leaves it.

    path-0000.safetensors, ...   each path, a plain model
    router.safetensors           features -> path; prefix and tokenizer of the documents
    features.safetensors         the small model that makes the features

Of the paths' files only those are opened that are loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from atoll.checkpoint import load_weights
from atoll.data import Tokenizer, tokenizer_from_json
from atoll.errors import CheckpointError, ConfigError
from atoll.models import LanguageModel, restored
from atoll.paths.layout import weights_name
from atoll.routing.features import FeatureModel
from atoll.routing.reader import reader_of
from atoll.routing.router import Router, read_router

ROUTER, FEATURES = "router.safetensors", "features.safetensors"


@dataclass(frozen=True, slots=True)
class PathFolder:
    """A folder as above; see :func:`open_paths`."""

    folder: Path
    router: Router
    router_file: Path
    tokenizer: Tokenizer
    features: Path
    """File of the small model."""

    @property
    def num_paths(self) -> int:
        """Number of paths."""
        return self.router.num_paths

    def file(self, path: int) -> Path:
        """Return the file of a path; raises ConfigError if there is no such path."""
        if not 0 <= path < self.num_paths:
            raise ConfigError(
                "there is no such path", given=path, expected=f"0 to {self.num_paths - 1}"
            )
        return self.folder / weights_name(path)

    def load(self, path: int) -> LanguageModel:
        """Return the model of a path, ready to evaluate; opens its file only.

        Raises:
            CheckpointError: it is missing or damaged, or of another tokenizer than the router.
            ConfigError: there is no such path.
        """
        file = self.file(path)
        weights = load_weights(file)
        if weights.tokenizer != self.router.tokenizer:
            raise CheckpointError(
                "a path reads other tokens than the router",
                given=f"{file} and {self.folder / ROUTER}",
                expected="one tokenizer: the documents are routed with that of the job's [data]",
                remedy="shard the corpus with the job file that trains the paths",
            )
        return restored(weights.model, weights.options, weights.state, where=str(file))

    def reader(self) -> FeatureModel:
        """Return the small model; raises CheckpointError or ConfigError."""
        weights = load_weights(self.features)
        return reader_of(weights, prefix=self.router.prefix, tokenizer=self.tokenizer)


def is_paths(folder: Path) -> bool:
    """Return whether a folder has the paths of a modular model."""
    return (folder / weights_name(0)).is_file()


def open_paths(folder: Path, *, shards: Path | None = None) -> PathFolder:
    """Open the folder of a finished run; reads the router only.

    Args:
        folder: With the paths.
        shards: The file of `atoll paths shard` beside which the router is; None: it is in `folder`.

    Raises:
        CheckpointError: there are no paths, or no router.
        DataError: the router cannot be read.
    """
    if not is_paths(folder):
        raise CheckpointError(
            "this is not a folder of paths", given=str(folder),
            expected=f"{weights_name(0)} and so on, as a job with [dipaco] leaves them in runs/JOB",
        )  # fmt: skip
    files = [folder / name for name in (ROUTER, FEATURES)]
    if shards is not None:
        files = [shards.with_name(f"{shards.stem}.{name}") for name in (ROUTER, FEATURES)]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(
            "nothing routes texts to these paths", given=f"no file {missing[0]}",
            expected="the router and the small model that `atoll paths shard` made",
            remedy="--shards FILE names what it wrote; or choose a path yourself: atoll generate "
            f"{folder / weights_name(0)}",
        )  # fmt: skip
    return open_routed(folder, *files)


def open_routed(folder: Path, router: Path, features: Path) -> PathFolder:
    """Open paths of which some may be missing, with the files of their router and small model.

    Raises:
        DataError: the router cannot be read.
    """
    found = read_router(router)
    return PathFolder(folder, found, router, tokenizer_from_json(found.tokenizer), features)
