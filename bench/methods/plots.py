"""Draw the figures of docs/methods: `python -m bench.methods.plots FILE`.

FILE is the ledger of finished runs (`--out` of bench.methods). One SVG per page: held-out loss
against bytes that each member sends per token, all methods as dots, the page's own by name. The
same file gives the same figures, byte for byte. Each is put at the end of its page, once, and the
tables of docs/measured/benchmarks.md are made anew.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atoll.errors import ConfigError
from atoll.methods.table import PRESETS
from bench.methods.ledger import Ledger, Record
from bench.methods.modelled import Clock
from bench.methods.setting import FULL, GROUPS, Setting
from bench.methods.shapes import judge
from bench.methods.table import make_rows
from bench.methods.tables import with_groups, with_tables

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "methods"
MEMBERS = 4
INK, GREY, LINE = "#0b6e99", "#b8bec4", "#d9dde1"
HEADING = "## Measured"
LABEL_SIZE, LETTER_WIDTH, LETTER_HEIGHT = 8, 4.4, 9.0
"""Of names beside dots, in points."""

Row = dict[str, Any]


def draw(rows: Sequence[Row], presets: Sequence[str], path: Path, *, title: str) -> None:
    """Write the figure in which the rows of some presets stand out.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "figures need matplotlib", given="it is not installed",
            remedy="pip install 'atoll[bench]'",
        ) from error  # fmt: skip
    settings: Any = {"svg.hashsalt": "atoll", "svg.fonttype": "none", "font.size": 9}
    with mpl.rc_context(settings):
        figure = Figure(figsize=(6.4, 3.4), layout="constrained")
        axes = figure.add_subplot()
        nothing = _nothing(rows)
        own = [row for row in rows if row["strategy"] in presets]
        others = [row for row in rows if row["strategy"] not in presets]
        axes.scatter([_x(r, nothing) for r in others], [r["loss"] for r in others], s=14, c=GREY)
        axes.scatter([_x(r, nothing) for r in own], [r["loss"] for r in own], s=26, c=INK)
        for row in own:
            _bar(axes, row, nothing)
        axes.set_xscale("log")
        axes.minorticks_off()
        axes.margins(x=0.12, y=0.12)
        axes.set_xlabel("bytes that each member sends per token")
        axes.set_ylabel("held-out loss, nats per byte")
        axes.set_title(title, loc="left", fontsize=9)
        axes.grid(color=LINE, linewidth=0.5)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        figure.draw_without_rendering()  # so that it is known where things are
        known = [row for row in others if row["row"] in ("alone", "ddp", "diloco")]
        _labels(axes, [*known, *own], nothing, own=presets)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    drawn = path.read_text(encoding="utf-8")  # a tenth of a point is enough
    short = re.sub(r"\d+\.\d{2,}", lambda found: f"{float(found[0]):.1f}", drawn)
    path.write_text(short, encoding="utf-8")


def _nothing(rows: Sequence[Row]) -> float:
    """Return where rows without traffic stand on a logarithmic axis: left of all others."""
    sent = [row["bytes_per_node_per_token"] for row in rows]
    return min((value for value in sent if value > 1e-3), default=1.0) / 5


def _x(row: Row, nothing: float) -> float:
    return max(float(row["bytes_per_node_per_token"]), nothing)


def _bar(axes: Any, row: Row, nothing: float) -> None:
    """Draw the interval over seeds, where there is one."""
    low, high = row["loss_interval"]
    if low is not None and high is not None:
        x = _x(row, nothing)
        axes.plot([x, x], [low, high], color=INK, linewidth=1)


def _labels(axes: Any, rows: Sequence[Row], nothing: float, *, own: Sequence[str]) -> None:
    """Write names beside their dots, each in the nearest place that is still free."""
    occupied: list[tuple[float, float, float, float]] = []
    for row in sorted(rows, key=lambda row: (row["strategy"] not in own, row["loss"])):
        point = (_x(row, nothing), row["loss"])
        x, y = axes.transData.transform(point) * 72 / axes.figure.dpi
        width = LETTER_WIDTH * len(row["row"])
        for up in (4, -10, 14, -20, 24, -30, 34, -40, 44, 54, 64):
            box = (x + 4, y + up, x + 4 + width, y + up + LETTER_HEIGHT)
            if not any(_overlap(box, other) for other in occupied):
                break
        else:
            continue  # too crowded here: the table has it
        occupied.append(box)
        axes.annotate(
            row["row"], point, xytext=(4, up), textcoords="offset points", fontsize=LABEL_SIZE,
            color=INK if row["strategy"] in own else "#6b737a",
        )  # fmt: skip


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def place(page: Path, figure: Path, *, words: str) -> None:
    """Put a figure at the end of a page; one that is there already is replaced.

    Other words below the heading stay.
    """
    target = figure.relative_to(page.parent).as_posix()
    link = f"![{words}]({target})"
    before = re.compile(rf"!\[[^\]]*\]\({re.escape(target)}\)\n\nHeld-out loss[^\n]*\n[^\n]*\n?")
    text = before.sub("", page.read_text(encoding="utf-8")).rstrip()
    if f"\n{HEADING}\n" not in text:
        text = f"{text.removesuffix(HEADING).rstrip()}\n\n{HEADING}"
    said = (
        f"Held-out loss against traffic on a GPT of 1.0 M parameters, {MEMBERS} members, equal "
        "tokens;\ngrey: the other methods. Made by `python -m bench.methods` and "
        "`python -m bench.methods.plots`."
    )
    page.write_text(f"{text}\n\n{link}\n\n{said}\n", encoding="utf-8")


def chosen(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that figures show: of one number of members, and one node alone."""
    return [row for row in rows if row["members"] in (MEMBERS, 1)]


def figures(rows: Sequence[Row], to: Path) -> None:
    """Draw the figure of every page in a folder that has rows."""
    for name in sorted({entry.page for entry in PRESETS.values()}):
        presets = [preset for preset, each in PRESETS.items() if each.page == name]
        path = to / Path(name).relative_to("docs/methods")
        if path.exists() and any(row["strategy"] in presets for row in rows):
            figure = path.parent / "figures" / f"{path.stem}.svg"
            draw(rows, presets, figure, title=", ".join(presets))
            place(path, figure, words=f"loss against bytes of {', '.join(presets)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="ledger of bench.methods")
    parser.add_argument("--to", type=Path, default=PAGES, help="folder of the pages")
    parser.add_argument("--benchmarks", type=Path, default=ROOT / "docs/measured/benchmarks.md")
    given = parser.parse_args()
    ledger, page = Ledger(given.file), given.benchmarks
    runs, rows = _of(ledger, FULL)
    larger, their_rows = _of(ledger, GROUPS)
    text = with_tables(page.read_text(encoding="utf-8"), rows, judge(runs))
    page.write_text(with_groups(text, their_rows, larger), encoding="utf-8")
    figures(chosen(rows), given.to)


def _of(ledger: Ledger, setting: Setting) -> tuple[list[Record], list[Row]]:
    """Return the runs of a setting, and the rows that they make."""
    same = {"steps": setting.steps, "scale": setting.scale}
    runs, walls = ledger.of("run", **same), ledger.of("wall", route="relay", **same)
    return runs, make_rows(runs, [], clock=Clock(), walls=walls)


if __name__ == "__main__":
    main()
