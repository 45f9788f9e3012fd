"""A folder of code on its way to the nodes: packed, named by its hash, unpacked safely.

    with pack(Path("my_project")) as packed:   # .atollignore, else .gitignore, is obeyed
        unpack(packed.path, Path("there"))     # whole or not at all, nothing outside of it

The same files always make the same pack, so it is sent and kept once. Imports errors only.
Start in `packing.py`.
"""

from __future__ import annotations

from atoll.code.ignore import Rules
from atoll.code.packing import Pack, pack
from atoll.code.unpacking import unpack

__all__ = ["Pack", "Rules", "pack", "unpack"]
