"""Options of the test suite, the order of its files, and randomness that is the same every time."""

from __future__ import annotations

import random
import sys

import pytest
from hypothesis import settings

from tests import order

# How long an example takes says more about what else the machine does than about the code. The
# examples are the same in every run: `--hypothesis-profile=explore` draws others.
settings.register_profile("atoll", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
settings.load_profile("atoll")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--regenerate`: write golden files anew instead of comparing with them."""
    parser.addoption("--regenerate", action="store_true", help="write golden files anew")


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
