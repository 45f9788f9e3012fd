"""A run at the terminal as an SVG file: frames of its view, one after the other, and its results.

The animation is CSS: a document or a browser shows the file without scripts. Readers who asked for
less motion, and programs without CSS animations, see the last frame. Every word has its own place,
and lines and bars are drawn, so that columns stay aligned in any font without spaced letters.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.segment import Segment
from rich.style import Style
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

WIDTH = 80
"""Columns of the terminal."""
CELL, LINE, FONT = 8.4, 19.0, 14
"""Size of a character and of its font; monospaced fonts are 0.6 as wide as high."""
MARGIN, BAR = 16, 34
"""Around the text, and the height of the window's bar."""
FRAMES = 20
FRAME_S, LAST_S = 0.6, 7.0
"""How long a frame of the run is shown, and the one with the results."""
_SECRET = re.compile(r"(?<=token=)[\w-]+")
_WORDS = re.compile(r"\S+(?: \S+)*")
_BOXES = "─━╸╺│╭╮╰╯"
_EDGES = re.compile(rf"[{_BOXES}]")

Lines = list[list[Segment]]


class Picture:
    """Keeps frames during the run; `save` writes them with the results below the last one."""

    def __init__(self, path: Path, *, command: str = "") -> None:
        """Write to `path` in the end; `command` is what was typed."""
        self.path = path
        self._command = command
        self._frames: list[Lines] = []

    def offer(self, frame: RenderableType) -> None:
        """Pass the current frame."""
        lines = _lines(_console(), frame)
        if not self._frames or lines != self._frames[-1]:
            self._frames.append(lines)

    def save(self, title: str, results: Callable[[Console], None]) -> None:
        """Write the file; `results` prints below the last frame."""
        console = _console()
        with console.capture() as printed:
            results(console)
        below = _lines(console, Text.from_ansi(_SECRET.sub("...", printed.get())))
        typed: Lines = [[Segment("$ ", Style(dim=True)), Segment(self._command)], []]
        begin = typed if self._command else []
        frames = [[*begin, *frame] for frame in _some(self._frames, FRAMES)]
        frames.append([*(frames[-1] if frames else begin), *below])
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(_animated(title, frames), encoding="utf-8", newline="\n")


def _console() -> Console:
    return Console(
        width=WIDTH, file=io.StringIO(), force_terminal=True, highlight=False,
        color_system="truecolor",
    )  # fmt: skip


def _lines(console: Console, shown: RenderableType) -> Lines:
    rows = console.render_lines(shown, console.options.update(width=WIDTH), pad=False)
    return [[segment for segment in row if segment.text.strip("\n")] for row in rows]


def _some(frames: Sequence[Lines], most: int) -> list[Lines]:
    """Return at most so many frames, in equal steps; the first and the last among them."""
    if len(frames) <= most:
        return list(frames)
    return [frames[round(at * (len(frames) - 1) / (most - 1))] for at in range(most)]


# ----------------------------------------------------------------------------------- the file


def _animated(title: str, frames: Sequence[Lines]) -> str:
    """Return the SVG text: frames one after the other, the last one for longer, and again."""
    width = WIDTH * CELL + 2 * MARGIN
    height = BAR + max(map(len, frames)) * LINE + MARGIN
    styles = _Styles()
    groups = [
        f'<g class="{"last" if at == len(frames) - 1 else "f"}" '
        f'style="animation-delay:{at * FRAME_S:.1f}s">{"".join(_rows(frame, styles))}</g>'
        for at, frame in enumerate(frames)
    ]
    moving_s = (len(frames) - 1) * FRAME_S
    whole_s = moving_s + LAST_S
    over, done = 100 * FRAME_S / whole_s, 100 * moving_s / whole_s
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" \
role="img" aria-label="{html.escape(title)}">
<style>
text {{ font: {FONT}px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  fill: #c5c8c6; white-space: pre; }}
path {{ fill: none; stroke: #c5c8c6; }}
.f {{ visibility: hidden; animation: frame {whole_s:.1f}s step-end infinite; }}
.last {{ animation: last {whole_s:.1f}s step-end infinite; animation-delay: 0s !important; }}
@keyframes frame {{ 0% {{ visibility: visible }} {over:.3f}% {{ visibility: hidden }} }}
@keyframes last {{ 0% {{ visibility: hidden }} {done:.3f}% {{ visibility: visible }} }}
@media (prefers-reduced-motion: reduce) {{ .f, .last {{ animation: none }} }}
{styles.sheet()}
</style>
<rect x="0.5" y="0.5" width="{width - 1:.0f}" height="{height - 1:.0f}" rx="8" fill="#1d2021" \
stroke="#8b949e" stroke-opacity="0.5"/>
<circle cx="18" cy="17" r="5.5" fill="#ff5f57"/><circle cx="37" cy="17" r="5.5" fill="#febc2e"/>\
<circle cx="56" cy="17" r="5.5" fill="#28c840"/>
<text x="{width / 2:.0f}" y="22" text-anchor="middle" opacity="0.7">{html.escape(title)}</text>
<g transform="translate({MARGIN} {BAR})">
{chr(10).join(groups)}
</g>
</svg>
"""


class _Styles:
    """The classes of a style sheet, one per style that occurs."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def name(self, style: Style | None) -> str:
        """Return the attribute of a style, empty for plain text."""
        if style is None:
            return ""
        rules = []
        if style.color is not None and not style.color.is_default:
            colour = style.color.get_truecolor(SVG_EXPORT_THEME).hex
            rules.append(f"fill: {colour}; stroke: {colour}")
        if style.bold:
            rules.append("font-weight: bold")
        if style.dim:
            rules.append("opacity: 0.6")
        if not rules:
            return ""
        return f' class="{self._names.setdefault("; ".join(rules), f"s{len(self._names)}")}"'

    def sheet(self) -> str:
        """Return the rules: letters are filled, lines are stroked."""
        lines = []
        for rules, name in self._names.items():
            letters = "; ".join(one for one in rules.split("; ") if not one.startswith("stroke"))
            strokes = "; ".join(one for one in rules.split("; ") if one[:4] not in ("fill", "font"))
            lines += [f"tspan.{name} {{ {letters} }}"]
            lines += [f"path.{name} {{ {strokes} }}"] if strokes else []
        return "\n".join(lines)


def _rows(frame: Lines, styles: _Styles) -> Iterator[str]:
    for number, row in enumerate(frame):
        column, words, strokes = 0, list[str](), list[str]()
        for segment in row:
            name, text = styles.name(segment.style), segment.text
            for found in _WORDS.finditer(_EDGES.sub(" ", text)):
                x = (column + cell_len(text[: found.start()])) * CELL
                words.append(
                    f'<tspan{name} x="{x:.1f}">{html.escape(found[0], quote=False)}</tspan>'
                )
            if drawn := "".join(_stroke(column + at, number, one) for at, one in _runs(text)):
                wide = ' stroke-width="4"' if "━" in text or "╸" in text or "╺" in text else ""
                strokes.append(f'<path{name}{wide} d="{drawn}"/>')
            column += cell_len(text)
        yield "".join(strokes)
        if words:
            yield f'<text y="{number * LINE + 14:.0f}">{"".join(words)}</text>'


def _runs(text: str) -> Iterator[tuple[int, str]]:
    """Yield the box characters of a text, equal ones together, with their columns."""
    for found in re.finditer(rf"([{_BOXES}])\1*", text):
        yield found.start(), found[0]


def _stroke(column: int, row: int, run: str) -> str:
    """Return the path of equal box characters."""
    x, top = column * CELL, row * LINE
    middle, centre, right = top + LINE / 2, x + CELL / 2, x + len(run) * CELL
    corner = {
        "╭": f"M{centre:.1f} {top + LINE:.1f}V{middle + 4:.1f}q0-4 4-4H{right:.1f}",
        "╮": f"M{x:.1f} {middle:.1f}H{centre - 4:.1f}q4 0 4 4V{top + LINE:.1f}",
        "╰": f"M{centre:.1f} {top:.1f}V{middle - 4:.1f}q0 4 4 4H{right:.1f}",
        "╯": f"M{x:.1f} {middle:.1f}H{centre - 4:.1f}q4 0 4-4V{top:.1f}",
    }
    if run[0] in corner:
        return corner[run[0]]
    if run[0] == "│":
        return "".join(f"M{centre + at * CELL:.1f} {top:.1f}v{LINE:.0f}" for at in range(len(run)))
    left = centre if run[0] == "╺" else x
    return f"M{left:.1f} {middle:.1f}H{centre if run[0] == '╸' else right:.1f}"
