"""`model.safetensors`: the weights under their plain names, and metadata to rebuild the model.

Any program that reads safetensors can read the file; the metadata name the model, its options and
its tokenizer. The shared part of a checkpoint has the same metadata.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from atoll.checkpoint.files import write_file
from atoll.checkpoint.format.part import part_blocks, read_part
from atoll.errors import CheckpointCorrupt, CheckpointMissing
from atoll.wire.manifest import MODEL_PREFIX as MODEL_PREFIX

_FORMAT = "atoll-weights-1"


@dataclass(frozen=True, slots=True)
class Weights:
    """Content of a weights file."""

    state: dict[str, Tensor]
    """Plain name -> tensor: `model.load_state_dict(weights.state)`."""
    model: str
    """Name of the model, as in a job file."""
    options: dict[str, Any]
    """All its options."""
    tokenizer: str
    """JSON that rebuilds the tokenizer."""
    metadata: dict[str, str]
    """All other metadata: job, round, step, ..."""


def describe(model: str, *, options: Mapping[str, Any], tokenizer: str) -> dict[str, str]:
    """Return the metadata from which a model and its tokenizer are rebuilt."""
    return {
        "format": _FORMAT,
        "model": model,
        "options": json.dumps(dict(options)),
        "tokenizer": tokenizer,
    }


def save_weights(path: Path, state: Mapping[str, Tensor], *, about: Mapping[str, str]) -> str:
    """Write a model's weights and return the file's SHA-256.

    Args:
        path: The file, written atomically.
        state: `model.state_dict()`. A tensor with two names is written under both.
        about: Metadata from `describe`, and others, e.g. `job` and `round`.

    Raises:
        StorageFull: the disk is full; an older file stays.
    """
    return write_file(path, part_blocks(state, about)).sha256


def load_weights(path: Path) -> Weights:
    """Return the weights in `model.safetensors` or in the shared part of a checkpoint.

    Raises:
        CheckpointMissing: there is no such file.
        CheckpointCorrupt: it is damaged, or does not name its model.
    """
    if not path.is_file():
        raise CheckpointMissing(
            "there are no weights", given=str(path), expected="a model.safetensors of a run"
        )
    part = read_part(path)
    metadata = dict(part.metadata)
    try:
        if metadata.pop("format") != _FORMAT:
            raise KeyError("format")
        model, tokenizer = metadata.pop("model"), metadata.pop("tokenizer")
        options = dict(json.loads(metadata.pop("options")))
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointCorrupt(
            "the file does not say which model its weights belong to",
            given=f"{path}, metadata {sorted(part.metadata)}",
            expected="a model.safetensors or shared.safetensors written by Atoll",
        ) from error
    return Weights(plain_names(part.tensors), model, options, tokenizer, metadata)


def plain_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the model's tensors under their own names, from either kind of file."""
    prefixed = {
        name.removeprefix(MODEL_PREFIX): tensor
        for name, tensor in tensors.items()
        if name.startswith(MODEL_PREFIX)
    }
    return prefixed or dict(tensors)
