"""Randomness by name: a run that goes on needs no state of it, only the number of the update."""

from __future__ import annotations

import random

import torch


def source(*parts: str | int) -> random.Random:
    """Return a source of chances that only these words and numbers decide."""
    return random.Random("/".join(map(str, parts)))


def generator(*parts: str | int) -> torch.Generator:
    """Return the same for torch."""
    return torch.Generator().manual_seed(source(*parts).getrandbits(63))
