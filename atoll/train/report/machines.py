"""Members of a report's charts by the names that people gave their machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from atoll.train.report.charts import Chart


def machines_of(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return the machine of each member, where the summary has it."""
    rows = summary.get("members") or ()
    return {str(row["member"]): str(row["node"]) for row in rows if row.get("node")}


def by_machine(charts: Sequence[Chart], names: Mapping[str, str]) -> list[Chart]:
    """Return the charts with machines as names of lines and rows; others stay as they are."""

    def renamed(trace: Mapping[str, Any]) -> dict[str, Any]:
        rows = [names.get(row, row) if isinstance(row, str) else row for row in trace["y"]]
        return {**trace, "name": names.get(str(trace.get("name")), trace.get("name")), "y": rows}

    return [
        (title, about, [renamed(one) for one in traces], look)
        for title, about, traces, look in charts
    ]
