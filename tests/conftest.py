"""Options of the test suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--regenerate`: write golden files anew instead of comparing with them."""
    parser.addoption("--regenerate", action="store_true", help="write golden files anew")
