"""Seeds for everything random in a job, derived from the job's seed and a purpose.

A resumed run needs no saved generator state, only the number of the update.
"""

from __future__ import annotations

import hashlib
import random

import torch


def seed_for(seed: int, *purpose: object) -> int:
    """Return a seed of 63 bits for one purpose, e.g. `seed_for(7, "actions", "light", 0)`."""
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def source(purpose: str, seed: int, *parts: str | int) -> random.Random:
    """Return a random source that depends only on these arguments."""
    return random.Random(seed_for(seed, purpose, *parts))


def generator(purpose: str, seed: int, *parts: str | int) -> torch.Generator:
    """Return the same as a torch generator."""
    return torch.Generator().manual_seed(seed_for(seed, purpose, *parts))
