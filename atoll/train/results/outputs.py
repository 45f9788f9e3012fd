"""Where the results of one member go, whichever trainer it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from atoll.wire.messages import Event, Point


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where one member's results go; the functions MUST NOT block."""

    directory: Path
    """Folder of `metrics.jsonl`, `result.json` and the weights."""
    report: Callable[[Point], None] | None = None
    """Takes measurements."""
    announce: Callable[[Event], None] | None = None
    """Takes events for people."""
    publish: Callable[[Path, str], None] | None = None
    """Uploads a finished file under a name."""
