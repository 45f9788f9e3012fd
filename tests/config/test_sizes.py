"""Sizes as people write them."""

from __future__ import annotations

import pytest

from atoll.config.sizes import parse_size
from atoll.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("16", 16e9), ("16GB", 16e9), ("80 GiB", 80 * 2**30), ("500 B", 500), ("1.5k", 1500)],
)
def test_a_size_is_read_in_its_unit(text: str, nbytes: float) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "b", "nan", "inf", "-1", "0", "1e10 TB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        parse_size(text)
