"""The ranks that this room's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.island.pool import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes that compute together; started once per worker of pytest."""
    found = Ranks()
    yield found
    found.close()
