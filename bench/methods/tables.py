"""Tables of docs/measured/benchmarks.md, which `python -m bench.methods.plots` fills in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.methods.ledger import Record
from bench.methods.modelled import RATES_BPS
from bench.methods.shapes import Losses, judge
from bench.methods.table import wall

BEGIN = "<!-- tables: python -m bench.methods.plots -->"
BEGIN_GROUPS = "<!-- larger groups: python -m bench.methods.plots -->"
END = "<!-- end of tables -->"
BASE = "diloco"
"""The row that others are compared with."""


def with_tables(text: str, rows: Sequence[Mapping[str, Any]], shapes: Sequence[Any]) -> str:
    """Return a page with both tables made anew; one without their place stays as it is."""
    return _placed(text, BEGIN, f"{methods(rows)}\n{claims(shapes)}")


def with_groups(text: str, rows: Sequence[Mapping[str, Any]], records: Sequence[Record]) -> str:
    """Return a page with the table of larger groups and its claims made anew, as `with_tables`."""
    shapes = [s for s in judge(records) if s["holds"] is not None]
    return _placed(text, BEGIN_GROUPS, f"{groups(rows, Losses(records))}\n{claims(shapes)}")


def _placed(text: str, begin: str, tables: str) -> str:
    before, mark, rest = text.partition(begin)
    if not mark:
        return text
    _, _, after = rest.partition(END)
    return f"{before}{begin}\n{tables}{END}{after}"


def methods(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of all rows."""
    heads = ["method", "codec", "members", "loss", "95 %", "bytes/token", "largest round"]
    heads += list(RATES_BPS)
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [
            row["row"], f"`{row['codec']}`", str(row["members"]), f"{row['loss']:.3f}",
            interval(row["loss_interval"]), number(row["bytes_per_node_per_token"]),
            size(row["peak_bytes"]), *(wall(row, name) for name in RATES_BPS),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def groups(rows: Sequence[Mapping[str, Any]], losses: Losses) -> str:
    """Return a table with a row per method and two columns per number of members."""
    by: dict[str, dict[int, Mapping[str, Any]]] = {}
    for row in rows:
        by.setdefault(row["row"], {})[row["members"]] = row
    sizes = sorted({row["members"] for row in rows} - {1})
    heads = ["method", "codec", "bytes/token"]
    heads += [word for size in sizes for word in (f"{size} members", f"over `{BASE}`")]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name, found in by.items():
        first = next(iter(found.values()))
        cells = [name, f"`{first['codec']}`", number(first["bytes_per_node_per_token"])]
        for members in sizes:
            there = found.get(members) or found.get(1)
            cells += [f"{there['loss']:.3f}" if there else "", _over(name, losses, members)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _over(name: str, losses: Losses, members: int) -> str:
    """Return a row's excess over that of DiLoCo with the same seeds."""
    if name == BASE or not losses.has(name, BASE, members=members):
        return ""
    found = losses.excess(name, BASE, members=members).plain()
    if found["low"] is None:
        return f"{100 * found['mean']:+.1f} %"
    return f"{100 * found['mean']:+.1f} % ({100 * found['low']:.1f} to {100 * found['high']:.1f})"


def claims(shapes: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of shapes: what is claimed, whether it came out, and the figures."""
    lines = ["| claim | came out | figures |", "|---|---|---|"]
    words = {True: "yes", False: "**no**", None: "not measured"}
    for shape in shapes:
        figures = "; ".join(f"{name}: {_figure(found)}" for name, found in shape["figures"].items())
        lines.append(f"| {shape['claim']} | {words[shape['holds']]} | {figures} |")
    return "\n".join(lines) + "\n"


def _figure(found: Any) -> str:
    if not isinstance(found, Mapping):
        return str(found)
    seeds = f"{found['seeds']} seeds" if found["seeds"] > 1 else "1 seed"
    if found["low"] is None:
        return f"{100 * found['mean']:+.2f} % ({seeds})"
    return (
        f"{100 * found['mean']:+.2f} % ({100 * found['low']:+.2f} to "
        f"{100 * found['high']:+.2f}, {seeds})"
    )


def interval(bounds: Sequence[float | None]) -> str:
    """Return where the mean over seeds may lie."""
    low, high = bounds
    return "" if low is None or high is None else f"{low:.3f} to {high:.3f}"


def number(value: float) -> str:
    """Return a number with about three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def size(nbytes: float) -> str:
    """Return bytes for people, powers of ten."""
    for unit in ("B", "kB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} MB"
