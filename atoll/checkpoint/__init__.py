"""Checkpoints: a job killed at any instant goes on from the last complete one, bit for bit.

Importing this package loads nothing; the names below are looked up when they are first used. So the
process that writes checkpoints needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_PLACES = {
    "SHARED": "part",
    "BackgroundSaver": "background",
    "DirectoryStore": "store",
    "FolderTarget": "orders",
    "HubStore": "hub_store",
    "HubTarget": "orders",
    "Part": "part",
    "Restored": "capture",
    "Saved": "background",
    "Skipped": "background",
    "Store": "store",
    "Weights": "weights",
    "adopt": "outer_state",
    "collect": "capture",
    "describe": "weights",
    "load_weights": "weights",
    "member_part": "part",
    "restore": "capture",
    "resume": "capture",
    "save": "capture",
    "save_weights": "weights",
}
"""Public name -> module of this package that defines it."""

if TYPE_CHECKING:
    from atoll.checkpoint.background import BackgroundSaver, Saved, Skipped
    from atoll.checkpoint.capture import Restored, collect, restore, resume, save
    from atoll.checkpoint.hub_store import HubStore
    from atoll.checkpoint.orders import FolderTarget, HubTarget
    from atoll.checkpoint.outer_state import adopt
    from atoll.checkpoint.part import SHARED, Part, member_part
    from atoll.checkpoint.store import DirectoryStore, Store
    from atoll.checkpoint.weights import Weights, describe, load_weights, save_weights

__all__ = [
    "SHARED",
    "BackgroundSaver",
    "DirectoryStore",
    "FolderTarget",
    "HubStore",
    "HubTarget",
    "Part",
    "Restored",
    "Saved",
    "Skipped",
    "Store",
    "Weights",
    "adopt",
    "collect",
    "describe",
    "load_weights",
    "member_part",
    "restore",
    "resume",
    "save",
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
