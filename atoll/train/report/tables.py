"""The tiles and tables of a report, as HTML; all text is escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from atoll import units
from atoll.ids import machine_names, spoken
from atoll.train.report.machines import machines_of

Points = Sequence[Mapping[str, Any]]


def worth(found: Mapping[str, Any]) -> str:
    """Return the value of each node, in sentences."""
    if not found:
        return ""
    whole = found["text"].partition(";")[0]  # what one more would add is the last line
    said = [whole, *(node["text"] for node in found["nodes"]), found["next"]["text"]]
    lines = "".join(f"<li>{text(sentence)}</li>" for sentence in dict.fromkeys(said))
    return f"<section><h2>Value of each machine</h2><ul>{lines}</ul></section>"


def tiles(summary: Mapping[str, Any]) -> str:
    """Return the figures of the summary, one box each."""
    strategy = summary.get("strategy") or {}
    shown = {
        "held-out loss": _number(summary.get("loss_final"), "{:.3f}"),
        "before": _number(summary.get("loss_first"), "{:.3f}"),
        "accuracy": _number(summary.get("accuracy"), "{:.1%}"),
        "nodes": summary.get("nodes"),
        "steps": _number(summary.get("steps"), "{:,}"),
        "tokens": _as(units.count, summary.get("tokens") or None),
        "tokens/s": _as(units.count, summary.get("tokens_per_s") or None),
        "steps took": _as(units.duration, summary.get("wall_s")),
        "of it computing": _number(summary.get("utilisation"), "{:.1%}"),
        "sent per node": _as(units.size, summary.get("bytes_sent_per_node")),
        "less than data parallel": _number(summary.get("reduction"), "{:,.0f}×"),
        "rounds": summary.get("rounds_committed"),
        "aborted rounds": summary.get("rounds_aborted") or None,
        "replicas identical": _identical(summary),
        "strategy": " × ".join(_short(part) for part in strategy.values()) or None,
    }
    return boxes(shown)


def _identical(summary: Mapping[str, Any]) -> str | None:
    """Return the verdict over the members' final states, with what it does not cover."""
    note = str(summary.get("replicas_note") or "")
    word = {True: "yes", False: "NO"}.get(summary.get("replicas_identical"))  # type: ignore[arg-type]
    return ": ".join(part for part in (word, note) if part) or None


def boxes(shown: Mapping[str, object]) -> str:
    """Return named figures, one box each; unknown ones are left out."""
    cells = "".join(
        f"<div><b>{text(value)}</b><span>{text(name)}</span></div>"
        for name, value in shown.items()
        if value is not None
    )
    return f"<div class='tiles'>{cells}</div>"


def _number(value: Any, form: str) -> str | None:
    return None if value is None else form.format(value)


def _as(unit: Callable[[float], str], value: Any) -> str | None:
    return None if value is None else unit(float(value))


def member_table(summary: Mapping[str, Any]) -> str:
    """Return the figures of each member."""
    names = machine_names(machines_of(summary))
    rows = summary.get("members") or []
    columns: dict[str, tuple[str, Callable[[Any], str]]] = {
        "member": ("machine", lambda name: names.get(name, name)),
        "finished": ("finished", lambda yes: "yes" if yes else "no"),
        "steps": ("steps", "{:,}".format), "rounds": ("rounds", "{:,}".format),
        "tokens": ("tokens", units.count), "tokens_per_s": ("tokens/s", units.count),
        "utilisation": ("computing", "{:.1%}".format), "sent_bytes": ("sent", units.size),
        "received_bytes": ("received", units.size),
    }  # fmt: skip
    body = "".join(
        "<tr>"
        + "".join(
            f"<td>{text('' if row.get(name) is None else form(row[name]))}</td>"
            for name, (_, form) in columns.items()
        )
        + "</tr>"
        for row in rows
    )
    return table("Members", [head for head, _ in columns.values()], body)


def event_table(events: Points, nodes: Mapping[str, str]) -> str:
    """Return the events, with times in UTC and each member as its machine in `nodes`."""
    names = machine_names(nodes)
    body = "".join(
        f"<tr><td>{datetime.fromtimestamp(float(e.get('time', 0)), UTC):%H:%M:%S}</td>"
        f"<td>{text(names.get(e.get('member', ''), e.get('member', '')))}</td>"
        f"<td>{text(e.get('kind', ''))}</td>"
        f"<td>{text(spoken(e.get('text', ''), nodes))}</td></tr>"
        for e in events[-500:]
    )
    return table("Events", ["UTC", "machine", "kind", "what"], body)


def table(title: str, heads: Sequence[str], body: str) -> str:
    """Return a table with a title, or an empty text without rows."""
    if not body:
        return ""
    head = "".join(f"<th>{text(name)}</th>" for name in heads)
    return (
        f"<section><h2>{text(title)}</h2><div class='wide'><table>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></section>"
    )


def text(value: object) -> str:
    """Return any value as escaped text."""
    return html.escape(str(value))


def _short(part: object) -> str:
    """Return a part of the strategy as people say it: `feedback(int8)` is int8."""
    return re.sub(r"^feedback\((.*)\)$", r"\1", str(part))
