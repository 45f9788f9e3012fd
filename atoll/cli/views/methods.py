"""Terminal output of the catalogue of methods: the list, and one method in full."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from atoll.cli.views import screen

if TYPE_CHECKING:
    from atoll.strategies.traffic_table import Row, Scale


WIDE = 132
"""From this width on every column is shown by itself; below, columns are merged."""


def listing(rows: Sequence[Row], scale: Scale, *, width: int) -> RenderableType:
    """Return all methods with a member's traffic per step."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", width=width)
    table.add_column("method", no_wrap=True, style="bold")
    table.add_column("sends/step", justify="right", no_wrap=True)
    for heading in _headings(width):
        table.add_column(heading, ratio=3 if heading == "paper" else 4)
    for row in rows:
        table.add_row(escape(row["name"]), _sent(row), *_words(row, width))
    return Group(table, Text(""), _legend(scale))


def parts(rows: Sequence[Row], scale: Scale, *, width: int) -> RenderableType:
    """Return the codecs, the aggregates, the collectives or the admission rules."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", width=width)
    table.add_column("name", no_wrap=True, style="bold")
    heading, legend = _figure_words(rows[0], scale)
    if heading:
        table.add_column(heading, justify="right", no_wrap=True)
    for name in _headings(width):
        table.add_column(name, ratio=3 if name == "paper" else 4)
    for row in rows:
        figure = [_figure(row)] if heading else []
        table.add_row(escape(row["name"]), *figure, *_words(row, width))
    return Group(table, Text(""), Text(f"{legend}More: {rows[0]['page']}", style="dim"))


def _figure_words(row: Row, scale: Scale) -> tuple[str, str]:
    """Return heading and meaning of the column of figures, if there is one."""
    size = f"{screen.count(scale.parameters)} parameters"
    if "busiest_sent" in row:
        return "sends", (
            f"sends: bytes that the busiest of {scale.peers} members sends to add up {size} in "
            "fp32 once. "
        )
    if "bits_per_value" in row:
        return "bits", (
            f"bits: what each number of {size} weighs, with the usual settings of the codec. "
        )
    return "", ""


def _figure(row: Row) -> str:
    if "busiest_sent" in row:
        return screen.size(row["busiest_sent"])
    bits = row["bits_per_value"]
    return "?" if bits is None else f"{bits:.2f}"


def _headings(width: int) -> tuple[str, ...]:
    return ("what it does", "good for", "paper") if width >= WIDE else ("what it does, what for",)


def _words(row: Row, width: int) -> tuple[Text, ...]:
    """Return the text cells of a row."""
    papers = [f"{paper['title']} ({paper['year']})" for paper in row["papers"][:1]]
    if width >= WIDE:
        links = [Text(paper, style=f"link {row['papers'][0]['url']}") for paper in papers]
        return (Text(row["line"]), Text(row["good_for"]), *(links or [Text("-")]))
    lines = [Text(row["line"]), Text(f"for: {row['good_for']}", style="cyan")]
    lines += [Text(f"loss: {row['loss'].replace('`', '')}")] if row["loss"] else []
    lines += [Text(paper, style="dim") for paper in papers]
    return (Text("\n").join(lines),)


def _sent(row: Row) -> str:
    """Return what a member sends per step through the relay."""
    if row["per_step"] is None:
        return "?"
    nbytes = row["per_step"]["relay_sent"]
    return screen.size(nbytes) if nbytes >= 0.5 or not nbytes else "< 1 B"


def _legend(scale: Scale) -> Text:
    return Text(
        f"sends/step: bytes that each of {scale.peers} members sends per optimizer step through "
        f"the hub's relay, in a run of {scale.steps} steps with {screen.count(scale.parameters)} "
        "parameters. More of one: atoll methods NAME; other tables: atoll methods codecs, "
        "aggregates, collectives, admission.",
        style="dim",
    )


def full(row: Row, scale: Scale) -> RenderableType:
    """Return one method in full: description, papers, traffic, options, job file table."""
    head = Table.grid(padding=(0, 2))
    head.add_column(style="dim", no_wrap=True)
    head.add_column()
    head.add_row("method", Text(row["name"], style="bold"))
    head.add_row("does", Text(row["line"]))
    head.add_row("good for", Text(row["good_for"]))
    if row["loss"]:
        head.add_row("loss", Text(f"{row['loss'].replace('`', '')}, at equal steps"))
    for paper in row["papers"]:
        head.add_row("paper", Text(f"{paper['title']} ({paper['year']})\n{paper['url']}"))
    head.add_row("page", row["page"])
    head.add_row("outer", row["outer"])
    head.add_row("codec", Text(row["codec"]))
    for label, line in traffic_lines(row, scale):
        head.add_row(label, Text(line))
    return Group(
        head, Text(""), _options(row), Text(""),
        Text("to paste into a job file:", style="dim"), Text(row["toml"].rstrip()),
    )  # fmt: skip


def traffic_lines(row: Row, scale: Scale) -> list[tuple[str, str]]:
    """Return what a member sends and receives per step, by route."""
    if row["per_step"] is None:
        return [("traffic", "install torch to see it: pip install 'atoll[train]'")]
    found, stages = row["per_step"], row["stages"]
    what = f"{screen.count(scale.parameters)} parameters, {scale.peers} members"
    lines = []
    if stages:
        what = (
            f"a stage's gradient, of {screen.count(scale.parameters // stages)} parameters, and "
            f"{max(1, scale.peers // stages)} members of {scale.peers}"
        )
        activations = (
            "besides, per microbatch: rows x tokens x width numbers to the next stage and as many "
            f"back, of {row['activation_bits']:.1f} bits each; for a job: atoll plan memory JOB "
            f"--stages {stages}"
        )
        lines = [("activations", activations)]
    return [
        (
            "traffic",
            f"per step and member: {what}, {row['rounds']} rounds in {scale.steps} steps",
        ),
        *(
            (
                route,
                f"{screen.size(found[f'{route}_sent'])} sent, "
                f"{screen.size(found[f'{route}_received'])} received",
            )
            for route in ("relay", "direct")
        ),
        *lines,
    ]


def _options(row: Row) -> RenderableType:
    """Return the options with their values; those set by the preset are highlighted."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("option", no_wrap=True)
    table.add_column("value", no_wrap=True)
    table.add_column("what it means")
    for option in row["options"]:
        changed = option["value"] != option["default"]
        value = Text(repr(option["value"]), style="bold" if changed else "")
        words = option["line"] + (f" Default: {option['default']!r}." if changed else "")
        table.add_row(escape(option["name"]), value, Text(words))
    return table
