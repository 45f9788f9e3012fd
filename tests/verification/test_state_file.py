"""States that other machines hand over: what is none is refused, whatever it holds."""

from __future__ import annotations

import pytest

from atoll.errors import WireError
from atoll.verification.state_file import heading, read_heading


def test_heading_is_read_back() -> None:
    assert read_heading(heading(12)) == 12


@pytest.mark.parametrize(
    "line", [b"", b"[]\n", b'{"model": -1}\n', b'{"model": true}\n', heading(1)[:-1], b"[" * 4000]
)
def test_anything_else_is_not_a_state(line: bytes) -> None:
    with pytest.raises(WireError, match="not a state"):
        read_heading(line)
