"""Options of the test suite, the order of its files, and randomness that is the same every time."""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Generator

import pytest
from hypothesis import settings

from tests import order

# Hundreds of processes load the same modules: each is compiled once, whatever the shell says.
# Without its compiled modules a worker takes 2.6 s of processor time to start, with them 1.5.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# How long an example takes says more about what else the machine does than about the code. The
# examples are the same in every run: `--hypothesis-profile=explore` draws others.
settings.register_profile("atoll", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
settings.load_profile("atoll")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--regenerate`: write golden files anew instead of comparing with them."""
    parser.addoption("--regenerate", action="store_true", help="write golden files anew")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Load all tests without collecting garbage, and never look at what was loaded again.

    A million objects stay to the end. To go through them took a third of the time to load, and an
    eighth of all that tests compute.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long files first: at the end no worker waits for another's last one."""
    items[:] = order.ordered(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin every test with the same random numbers, whatever ran before it."""
    random.seed(0)
    for name, seed in (("numpy", "random.seed"), ("torch", "manual_seed")):
        if name in sys.modules:  # loading it takes seconds, and not every test needs it
            found = sys.modules[name]
            for part in seed.split("."):
                found = getattr(found, part)
            found(0)  # type: ignore[operator]
