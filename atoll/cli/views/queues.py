"""Queues, topics and dead letters as tables."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from atoll.cli.views import screen
from atoll.errors import DataError
from atoll.queues import serialization

_SHOWN = 60
"""Characters of a value that a table shows."""


def queues_table(rows: Sequence[dict[str, Any]]) -> RenderableType:
    """Return every queue and topic, one per line."""
    shown = [row for row in rows if not row["queue"].startswith("node/")]
    if not shown:
        return "no queue yet; create one with run.queue, or `atoll queue put NAME VALUE`"
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("queue", "kind", "ready", "leased", "dead", "size", "oldest", "in/s", "out/s"):
        table.add_column(heading)
    for row in shown:
        dead = f"[red]{row['dead']}[/]" if row["dead"] else "0"
        table.add_row(
            escape(row["queue"]),
            row["kind"],
            str(row["ready"]),
            str(row["leased"]),
            dead,
            screen.size(row["bytes"]),
            f"{row['oldest_s']:.0f} s" if row["ready"] else "-",
            f"{row['in_per_s']:.1f}",
            f"{row['out_per_s']:.1f}",
        )
    return table


def queue_table(row: dict[str, Any]) -> RenderableType:
    """Return one queue with its limits."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    limit = f"{row['max_items']} items" if row["max_items"] else "any number of items"
    size = screen.size(row["max_bytes"]) if row["max_bytes"] else "any size"
    for name, text in (
        (row["kind"], row["queue"]),
        ("ready", f"{row['ready']}, the oldest for {row['oldest_s']:.0f} s"),
        ("leased", str(row["leased"])),
        ("dead letters", str(row["dead"])),
        ("size", screen.size(row["bytes"])),
        ("rates", f"{row['in_per_s']:.1f} in, {row['out_per_s']:.1f} out per second"),
        ("holds", f"{limit}, {size}; then: {row['overflow']}"),
        ("waiting", f"{row['waiting_producers']} producers"),
        ("subscribers" if row["kind"] == "topic" else "consumers", str(row["subscribers"])),
    ):
        table.add_row(f"[dim]{name}[/]", escape(text))
    return table


def letters_table(letters: Sequence[dict[str, Any]]) -> RenderableType:
    """Return dead letters."""
    if not letters:
        return "no dead letter"
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("number", "key", "attempts", "reason", "value"):
        table.add_column(heading)
    for letter in letters:
        table.add_row(
            str(letter["seq"]),
            escape(letter["key"]),
            str(letter["attempts"]),
            escape(letter["reason"]),
            escape(_value(letter)),
        )
    return table


def _value(letter: dict[str, Any]) -> str:
    """Return the start of a value, or its kind."""
    payload = base64.b64decode(letter["payload"])
    if letter.get("blob"):
        return f"large, blob {letter['blob'][:12]}"
    if payload[: len(serialization.MAGIC) + 1] in (
        serialization.MAGIC + b"t",
        serialization.MAGIC + b"n",
    ):
        return f"tensors, {screen.size(len(payload))}"
    try:
        return repr(serialization.decode(payload))[:_SHOWN]
    except DataError:
        return f"damaged, {screen.size(len(payload))}"
