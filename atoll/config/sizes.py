"""Sizes as people write them."""

from __future__ import annotations

from atoll.errors import ConfigError

_UNITS = {
    "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40,
    "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
}  # fmt: skip


def parse_size(text: str) -> int:
    """Return bytes from a size like `16GB`, `80 GiB` or `500 B`; a bare number is GB.

    Raises:
        ConfigError: it is not such a size, or not above 0.
    """
    words = text.strip().lower().replace(" ", "")
    plain = words.removesuffix("b")
    unit = next((unit for unit in _UNITS if plain.endswith(unit)), "")
    try:
        value = float(plain.removesuffix(unit)) * _UNITS.get(unit, 10**9 if plain == words else 1)
    except ValueError:
        value = 0.0
    if not 1 <= value < 1e18:
        raise ConfigError("this size cannot be read", given=repr(text), expected="e.g. 16GB")
    return round(value)


def size_text(nbytes: float) -> str:
    """Return bytes for people, e.g. `1.5 GB`."""
    for unit, value in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= value:
            return f"{nbytes / value:.4g} {unit}"
    return f"{nbytes:.0f} bytes"
