"""Seeds for everything random in a job, each from the job's seed and what it is for."""

from __future__ import annotations

import hashlib


def seed_for(seed: int, *purpose: object) -> int:
    """Return a seed of 63 bits for one purpose, e.g. `seed_for(7, "actions", "light", 0)`."""
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
