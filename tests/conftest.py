"""Options of the test suite."""

from __future__ import annotations

import pytest
from hypothesis import settings

# How long an example takes says more about what else the machine does than about the code.
settings.register_profile("atoll", deadline=None)
settings.load_profile("atoll")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--regenerate`: write golden files anew instead of comparing with them."""
    parser.addoption("--regenerate", action="store_true", help="write golden files anew")
