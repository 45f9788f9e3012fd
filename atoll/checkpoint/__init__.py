"""Checkpoints: a job killed at any instant goes on from the last complete one, bit for bit."""

from atoll.checkpoint.capture import Restored, collect, restore, resume, save
from atoll.checkpoint.hub_store import HubStore
from atoll.checkpoint.part import SHARED, Part, member_part
from atoll.checkpoint.store import DirectoryStore, Store
from atoll.checkpoint.weights import Weights, describe, load_weights, save_weights

__all__ = [
    "SHARED",
    "DirectoryStore",
    "HubStore",
    "Part",
    "Restored",
    "Store",
    "Weights",
    "collect",
    "describe",
    "load_weights",
    "member_part",
    "restore",
    "resume",
    "save",
    "save_weights",
]
