"""Links between a hub's nodes as they were last measured here, in a file of this user."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

from atoll.fleet.fleet import Link

FILE = "lines.json"
KEPT_S = 14 * 86_400.0
"""Older measurements say little of today's lines."""


def keep_links(home: Path, hub: str, links: Sequence[Link], *, now: float) -> None:
    """Remember what was measured between the nodes of a hub, in place of what was before."""
    path = home / FILE
    known = _read(path)
    known[hub] = {"time": now, "links": [dataclasses.asdict(link) for link in links]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(known), encoding="utf-8", newline="\n")


def kept_links(home: Path, hub: str, nodes: Container[str], *, now: float) -> list[Link]:
    """Return the remembered links between these nodes of a hub, unless they are too old."""
    found = _read(home / FILE).get(hub)
    try:
        if found is None or now - float(found["time"]) > KEPT_S:
            return []
        links = [Link(**fields) for fields in found["links"]]
    except (KeyError, TypeError, ValueError):  # damaged, or written by another version
        return []
    return [link for link in links if all(end in nodes for end in link.ends)]


def _read(path: Path) -> dict[str, Any]:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
