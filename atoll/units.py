"""Numbers for people: bytes, counts, spans of time. One form in the terminal and in reports."""

from __future__ import annotations


def size(nbytes: float) -> str:
    """Return a number of bytes, e.g. ``1.5 MB`` (powers of ten)."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(nbytes) < 1000 or unit == "TB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    raise AssertionError("unreachable")


def count(number: float) -> str:
    """Return a large number, e.g. ``26.4 k``."""
    for unit in ("", " k", " M", " G"):
        if abs(number) < 1000 or unit == " G":
            return f"{number:.0f}" if not unit else f"{number:.1f}{unit}"
        number /= 1000
    raise AssertionError("unreachable")


def duration(seconds: float | None) -> str:
    """Return a span of time, e.g. ``2:05`` or ``1:02:05``."""
    if seconds is None:
        return "-"
    whole = max(0, round(seconds))
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
