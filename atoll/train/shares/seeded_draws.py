"""Draw the same order from a sampler on every member, whatever its source of random numbers."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from atoll.data.order import hashes
from atoll.errors import DataError

CHUNK = 1024
"""Draws between two exchanges of the global random states; an endless sampler is never exhausted.
"""


class _RandomStates:
    """Random states of torch, Python and NumPy of its own; active inside the block only."""

    def __init__(self, key: int) -> None:
        self._torch = torch.Generator().manual_seed(key).get_state()
        self._python: Any = random.Random(key).getstate()
        self._numpy: Any = np.random.RandomState(key).get_state()

    def _exchange(self) -> None:
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        self._torch, self._python, self._numpy = before

    def __enter__(self) -> None:
        self._exchange()

    def __exit__(self, *_: object) -> None:
        self._exchange()


def seeded_draws(sampler: Any, *, seed: int, pass_: int) -> Iterator[Any]:
    """Yield what a sampler draws in one pass, equal on every member of the same seed.

    Generators that the sampler holds are seeded for this; the global ones are restored.
    """
    key = int(hashes(1, key=(seed, pass_))[0] % (1 << 32))
    _seed_generators(sampler, key)
    states = _RandomStates(key)
    with states:
        drawn = iter(sampler)
    while True:
        with states:
            chunk = list(itertools.islice(drawn, CHUNK))
        if not chunk:
            return
        yield from chunk


def check_repeatable(sampler: Any, *, seed: int) -> None:
    """Check that equal seeds give equal draws.

    Raises:
        DataError: they do not, so members would deal out different orders.
    """
    try:
        copies = [copy.deepcopy(sampler) for _ in range(2)]
    except (TypeError, RuntimeError, NotImplementedError):
        return  # it holds something that cannot be copied, and draws would change its state
    first, second = (
        list(itertools.islice(seeded_draws(each, seed=seed, pass_=0), CHUNK)) for each in copies
    )
    if first != second:
        raise DataError(
            "this sampler cannot be shared out among members",
            given=f"{type(sampler).__name__} draws another order each time, with the same seed",
            expected="an order that follows from torch's, Python's or NumPy's random numbers, or "
            "from a generator in an attribute of the sampler",
            remedy="seed its random numbers, or shard the data set and sample from the share",
        )


def _seed_generators(sampler: Any, key: int) -> None:
    """Seed the generators in a sampler's attributes, and in samplers that it wraps."""
    for value in getattr(sampler, "__dict__", {}).values():
        if isinstance(value, torch.Generator):
            value.manual_seed(key)
        elif isinstance(value, random.Random | np.random.RandomState):
            value.seed(key)
        elif isinstance(value, np.random.Generator):
            bits = value.bit_generator
            bits.state = type(bits)(key).state
        elif isinstance(value, Sampler):
            _seed_generators(value, key)
