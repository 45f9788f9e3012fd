"""Checkpoints: after a kill at any instant a job resumes from the last complete one, bit for bit.

May import the leaves, wire, net, task and devices. Importing this package loads nothing: its public
names are imported at first use, so that the writer process needs no torch. Start reading at
`format/part.py` (what is saved), then `stores/store.py` (where) and `state/capture.py`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_PLACES = {
    "SHARED": "format.part",
    "BackgroundSaver": "background.background",
    "DirectoryStore": "stores.store",
    "Extras": "state.capture",
    "FolderTarget": "background.messages",
    "HubStore": "stores.hub_store",
    "HubTarget": "background.messages",
    "OuterState": "state.capture",
    "Part": "format.part",
    "Restored": "state.capture",
    "SavePoint": "stores.store",
    "Saved": "background.background",
    "Skipped": "background.background",
    "Store": "stores.store",
    "Weights": "format.weights",
    "adopt": "state.outer_state",
    "collect": "state.capture",
    "describe": "format.weights",
    "kept_state": "state.frozen",
    "load_weights": "format.weights",
    "member_part": "format.part",
    "restore": "state.capture",
    "resume": "state.capture",
    "save_weights": "format.weights",
}
"""Public name -> module of this package that defines it."""

if TYPE_CHECKING:
    from atoll.checkpoint.background.background import BackgroundSaver, Saved, Skipped
    from atoll.checkpoint.background.messages import FolderTarget, HubTarget
    from atoll.checkpoint.format.part import SHARED, Part, member_part
    from atoll.checkpoint.format.weights import Weights, describe, load_weights, save_weights
    from atoll.checkpoint.state.capture import (
        Extras,
        OuterState,
        Restored,
        collect,
        restore,
        resume,
    )
    from atoll.checkpoint.state.frozen import kept_state
    from atoll.checkpoint.state.outer_state import adopt
    from atoll.checkpoint.stores.hub_store import HubStore
    from atoll.checkpoint.stores.store import DirectoryStore, SavePoint, Store

__all__ = [
    "SHARED",
    "BackgroundSaver",
    "DirectoryStore",
    "Extras",
    "FolderTarget",
    "HubStore",
    "HubTarget",
    "OuterState",
    "Part",
    "Restored",
    "SavePoint",
    "Saved",
    "Skipped",
    "Store",
    "Weights",
    "adopt",
    "collect",
    "describe",
    "kept_state",
    "load_weights",
    "member_part",
    "restore",
    "resume",
    "save_weights",
]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use."""
    if name not in _PLACES:
        raise AttributeError(f"module 'atoll.checkpoint' has no attribute {name!r}")
    return getattr(importlib.import_module(f"atoll.checkpoint.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    """Return the public names, imported or not."""
    return sorted([*globals(), *__all__])
