"""Randomness by name: a run that goes on needs no state of it, only the number of the update."""

from __future__ import annotations

import random

import torch

from atoll.rl.seeds import seed_for


def source(purpose: str, seed: int, *parts: str | int) -> random.Random:
    """Return a source of chances that only these words and numbers decide."""
    return random.Random(seed_for(seed, purpose, *parts))


def generator(purpose: str, seed: int, *parts: str | int) -> torch.Generator:
    """Return the same for torch."""
    return torch.Generator().manual_seed(seed_for(seed, purpose, *parts))
