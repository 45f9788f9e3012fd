"""Packs a folder of code, named by its hash, and unpacks it safely on the nodes.

    with pack(Path("my_project")) as packed:   # obeys .atollignore, else .gitignore
        unpack(packed.path, Path("there"))     # atomic, nothing outside of the target

The same files always give the same pack, so it is sent and stored once. May import
errors and system only. Start in `packing.py`.
"""

from __future__ import annotations

from atoll.code.ignore import Rules
from atoll.code.packing import Pack, pack
from atoll.code.unpacking import unpack

__all__ = ["Pack", "Rules", "pack", "unpack"]
