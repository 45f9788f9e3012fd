"""The tiles and tables of a report, as HTML; all text is escaped."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

Points = Sequence[Mapping[str, Any]]


def worth(found: Mapping[str, Any]) -> str:
    """Return the value of each node, in sentences."""
    if not found:
        return ""
    said = [found["text"], *(node["text"] for node in found["nodes"]), found["next"]["text"]]
    lines = "".join(f"<li>{text(sentence)}</li>" for sentence in dict.fromkeys(said))
    return f"<section><h2>Value of each machine</h2><ul>{lines}</ul></section>"


def tiles(summary: Mapping[str, Any]) -> str:
    """Return the figures of the summary, one box each."""
    strategy = summary.get("strategy") or {}
    shown = {
        "held-out loss": _number(summary.get("loss_final"), "{:.4f}"),
        "before": _number(summary.get("loss_first"), "{:.4f}"),
        "accuracy": _number(summary.get("accuracy"), "{:.1%}"),
        "nodes": summary.get("nodes"),
        "steps": summary.get("steps"),
        "tokens": _number(summary.get("tokens"), "{:,}"),
        "tokens/s": _number(summary.get("tokens_per_s"), "{:,.0f}"),
        "seconds": _number(summary.get("wall_s"), "{:.1f}"),
        "utilisation": _number(summary.get("utilisation"), "{:.1%}"),
        "bytes per node": _number(summary.get("bytes_sent_per_node"), "{:,}"),
        "fewer than data parallel": _number(summary.get("reduction"), "{:.0f}×"),
        "rounds": summary.get("rounds_committed"),
        "aborted": summary.get("rounds_aborted"),
        "replicas identical": _identical(summary),
        "strategy": " × ".join(str(part) for part in strategy.values()) or None,
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


def member_table(summary: Mapping[str, Any]) -> str:
    """Return the figures of each member."""
    rows = summary.get("members") or []
    columns = {
        "member": "{}", "finished": "{}", "steps": "{}", "rounds": "{}", "tokens": "{:,}",
        "tokens_per_s": "{:,.0f}", "utilisation": "{:.1%}", "sent_bytes": "{:,.0f}",
        "received_bytes": "{:,.0f}",
    }  # fmt: skip
    body = "".join(
        "<tr>"
        + "".join(
            f"<td>{text(_number(row.get(name), form) or '')}</td>" for name, form in columns.items()
        )
        + "</tr>"
        for row in rows
    )
    return table("Members", [name.replace("_", " ") for name in columns], body)


def event_table(events: Points) -> str:
    """Return the events, with times in UTC."""
    body = "".join(
        f"<tr><td>{datetime.fromtimestamp(float(e.get('time', 0)), UTC):%H:%M:%S}</td>"
        f"<td>{text(e.get('member', ''))}</td><td>{text(e.get('kind', ''))}</td>"
        f"<td>{text(e.get('text', ''))}</td></tr>"
        for e in events[-500:]
    )
    return table("Events", ["UTC", "member", "kind", "what"], body)


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
