"""Whether a job's machines and lines have changed so much that it is to be planned again. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from atoll.hub.jobs.people import few

MUCH = 0.2
"""A change of members, rates or round trips above this share is worth another plan."""
LEAST_MS = 5.0
"""Round trips that differ by less are alike, whatever the share."""
LASTS_S = 10.0
"""A change must last so long: a member that is back at once is none."""
PAUSE_S = 60.0
"""Between two plans of one job."""
NEAR_MS = 10.0
"""Lines between members at one place are not looked at: rates of busy machines are noise."""
MOST_SAID = 4
"""Changes that a message names."""


@dataclass(frozen=True)
class Line:
    """A measured line; 0: not measured."""

    up_bps: float = 0.0
    down_bps: float = 0.0
    latency_ms: float = 0.0

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Line:
        """Return that of a node to the hub, as the hub lists it."""
        stats = row.get("stats") or {}
        figures = (stats.get(name) for name in ("up_bps", "down_bps", "latency_ms"))
        return cls(*(float(value or 0.0) for value in figures))


@dataclass(frozen=True)
class Lines:
    """What members of a job send through, as far as it was measured."""

    hub: Mapping[str, Line]
    """Of every member, to the hub and back."""
    between: Mapping[tuple[str, str], Line] = field(default_factory=dict)
    """From one member to another, in `up_bps`."""


@dataclass
class Watch:
    """What a job was planned for last, and since when that is no longer so."""

    lines: Lines
    since_s: float | None = None
    """When it was first seen to have changed; None: it has not."""
    not_before_s: float = 0.0

    def look(self, lines: Lines, now_s: float) -> str:
        """Return why it is to be planned again, in words; empty: it is not.

        If it is, `lines` become those that it was planned for.
        """
        found = changes(self.lines, lines)
        if not found:
            self.since_s = None
            return ""
        self.since_s = now_s if self.since_s is None else self.since_s
        if now_s < max(self.since_s + LASTS_S, self.not_before_s):
            return ""
        self.lines, self.since_s, self.not_before_s = lines, None, now_s + PAUSE_S
        return "; ".join(found)


def changes(before: Lines, now: Lines) -> list[str]:
    """Return in words what has changed much; empty: nothing has."""
    found = list(_members(before.hub, now.hub))
    for name in sorted(before.hub.keys() & now.hub.keys()):
        found += _line(before.hub[name], now.hub[name], f"{name}'s line", f"{name}'s round trip")
    for pair in sorted(before.between.keys() & now.between.keys()):
        old, new, name = before.between[pair], now.between[pair], " to ".join(pair)
        if max(old.latency_ms, new.latency_ms) > NEAR_MS:
            found += _line(old, new, f"the line {name}", f"the round trip {name}")
    return _first(found)


def _members(before: Mapping[str, Line], now: Mapping[str, Line]) -> Iterator[str]:
    gone, come = sorted(before.keys() - now.keys()), sorted(now.keys() - before.keys())
    if len(gone) + len(come) <= MUCH * len(before):
        return
    if gone:
        yield f"{few(gone)} {'is' if len(gone) == 1 else 'are'} gone"
    if come:
        yield f"{few(come)} {'has' if len(come) == 1 else 'have'} come"


def _line(old: Line, new: Line, line: str, trip: str) -> Iterator[str]:
    ways = ((" up", old.up_bps, new.up_bps), (" down", old.down_bps, new.down_bps))
    for way, was, became in ways:
        if was and became and abs(became / was - 1) > MUCH:
            word = "faster" if became > was else "slower"
            yield f"{line}{way if old.down_bps else ''} is {abs(became / was - 1):.0%} {word}"
    was, became = old.latency_ms, new.latency_ms
    if was and became and abs(became - was) > max(LEAST_MS, MUCH * was):
        yield f"{trip} went from {was:.0f} to {became:.0f} ms"


def _first(found: list[str]) -> list[str]:
    """Return the first reasons, and how many more there are: they become one line."""
    rest = len(found) - MOST_SAID
    return [*found[:MOST_SAID], f"{rest} more changes"] if rest > 1 else found
