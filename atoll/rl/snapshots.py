"""Weights on their way down: tensors by name, with what they are and how they were packed."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from atoll.errors import DataError
from atoll.rl.messages import about_of, with_about, without_about

KIND = "snapshot"


def encode_snapshot(snapshot: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a snapshot as a message; nothing in it is shared with the network."""
    copied = {
        name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in snapshot.items()
    }
    return with_about(copied, KIND)


def decode_snapshot(message: object) -> dict[str, Tensor]:
    """Return the tensors of a snapshot.

    Raises:
        DataError: it is none, or of another version.
    """
    about_of(message, KIND)
    if not isinstance(message, Mapping) or not all(isinstance(t, Tensor) for t in message.values()):
        raise DataError("weights from a topic make no sense", given=type(message).__name__)
    return without_about(message)
