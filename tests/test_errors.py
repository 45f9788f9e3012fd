"""Errors cross the wire."""

from __future__ import annotations

import pytest

from atoll.errors import AtollError, ConfigError, GroupError, from_dict
from atoll.recovery.source import SourceAdvanced


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConfigError("x"), ConfigError),
        (SourceAdvanced(3), GroupError),
        (AtollError("x"), AtollError),
    ],
)
def test_errors_cross_the_wire(error: AtollError, kind: type[AtollError]) -> None:
    found = from_dict(error.to_dict())
    assert type(found) is kind
    assert found.message() == error.message()
