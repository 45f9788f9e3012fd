"""Check that a sharded checkpoint fits the model and the optimizer."""

from __future__ import annotations

from collections.abc import Mapping

from atoll.checkpoint.format.pieces import Pieces
from atoll.checkpoint.format.weights import MODEL_PREFIX
from atoll.checkpoint.state.sharded_state import KIND, Trained, kind_of
from atoll.errors import CheckpointError

SHOWN = 3
"""Names of each kind that a message lists."""


def check_same_model(
    pieces: Pieces, wanted: Mapping[str, tuple[int, ...]], *, partly: bool = False
) -> None:
    """Raise for a checkpoint of another model; `partly`: it may have more tensors."""
    held = {name: cut.size for name, cut in pieces.cuts.items() if name.startswith(MODEL_PREFIX)}
    plain = len(MODEL_PREFIX)
    troubles = {
        "it lacks": [name[plain:] for name in sorted(wanted.keys() - held.keys())],
        "only it has": []
        if partly
        else [name[plain:] for name in sorted(held.keys() - wanted.keys())],
        "shapes differ:": [
            f"{name[plain:]} {held[name]} instead of {wanted[name]}"
            for name in sorted(held.keys() & wanted.keys())
            if held[name] != wanted[name]
        ],
    }
    found = [
        f"{kind} {', '.join(names[:SHOWN])}"
        + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
        for kind, names in troubles.items()
        if names
    ]
    if found:
        raise CheckpointError(
            "the sharded checkpoint is of another model", given="; ".join(found),
            expected=f"the {len(wanted)} tensors of this model",
            remedy="build the model as it was when it was saved; the mesh may be another",
        )  # fmt: skip


def check_same_optimizer(pieces: Pieces, trained: Trained) -> None:
    """Raise for the state of another optimizer."""
    saved = {texts[KIND] for texts in pieces.texts if KIND in texts}
    own = kind_of(trained.optimizer) if trained.optimizer is not None else ""
    if own and saved and own not in saved:
        raise CheckpointError(
            "the sharded checkpoint is of another optimizer", given=", ".join(sorted(saved)),
            expected=own, remedy="build the optimizer as it was when it was saved",
        )  # fmt: skip
