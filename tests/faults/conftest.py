"""How many schedules the simulation tries: a few thousand by default, any number on demand."""

from __future__ import annotations

import contextlib

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--schedules N`: so many more seeds, for a night's run of this folder."""
    with contextlib.suppress(ValueError):
        parser.addoption(
            "--schedules", type=int, default=0, help="random schedules, and seeds per cell / 500"
        )


@pytest.fixture
def schedules(request: pytest.FixtureRequest) -> int:
    """Return how many more schedules were asked for."""
    return int(request.config.getoption("--schedules", default=0) or 0)
