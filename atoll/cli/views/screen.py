"""Terminal formatting: errors, sizes, durations, the two consoles."""

from __future__ import annotations

import datetime
import os
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment

from atoll import config
from atoll.errors import AtollError
from atoll.units import count as count
from atoll.units import duration as duration
from atoll.units import size as size

COMMANDS_TO_TERMINALS = {
    code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"
} | {ord("\r"): " "}
"""C0 and C1 control characters, among them ESC and CSI, and how they are shown.

A progress bar's carriage return is a space.
"""

ORDER_OF_LETTERS = {
    code: f"\\u{code:x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
}
"""Characters that make a text read otherwise than it is, and how they are shown."""


def harmless(text: str) -> str:
    """Return text with what would command a terminal made visible: ESC becomes x1b.

    What jobs print, and names that others choose, could clear the screen, set its title or write
    to the clipboard.
    """
    if text.isascii() and text.isprintable():
        return text
    return text.translate(COMMANDS_TO_TERMINALS | ORDER_OF_LETTERS)


class HarmlessConsole(Console):
    """Passes its own commands to the terminal, but none that is in a text."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield the segments of what is printed, texts made harmless."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(harmless(segment.text), segment.style)


def output() -> Console:
    """Return the console of standard output."""
    return HarmlessConsole(highlight=False, emoji=False)


def errors() -> Console:
    """Return the console of standard error."""
    return HarmlessConsole(stderr=True, highlight=False, emoji=False)


def show_error(error: AtollError) -> None:
    """Print one error: what failed, what was given, what was expected, what to do."""
    console = errors()
    console.print(f"[bold red]error:[/] {escape(error.what)}", soft_wrap=True)
    for label, text in (
        ("given", error.given),
        ("expected", error.expected),
        ("what to do", error.remedy),
    ):
        if text is not None:
            console.print(f"  [dim]{label + ':':<11}[/] {escape(str(text))}", soft_wrap=True)


def show_surprise(error: Exception) -> None:
    """Print an unexpected exception, and keep its traceback in a file."""
    text = "".join(traceback.format_exception(error))
    path = config.home() / "last-error.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
        where = f"its traceback is in {path}"
    except OSError:
        where = "run the same with --debug to see its traceback"
    console = errors()
    console.print(
        f"[bold red]error:[/] something Atoll did not expect: "
        f"{escape(type(error).__name__)}: {escape(str(error))}",
        soft_wrap=True,
    )
    console.print(f"  [dim]{'what to do:':<11}[/] this is a bug; {escape(where)}", soft_wrap=True)


def show_traceback() -> None:
    """Print the traceback of the exception that is being handled."""
    errors().print(escape(traceback.format_exc()), soft_wrap=True)


def close_output() -> None:
    """Redirect standard output to the null device, so that the exit raises no error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def ago(seconds: float) -> str:
    """Return how long ago something was, e.g. ``3 s`` or ``2 h``."""
    for unit, length in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def gflops(number: float) -> str:
    """Return a speed in 10^9 operations per second for people, with two digits where it is low."""
    return f"{number:.2g} GFLOP/s" if number < 10 else f"{number:,.0f} GFLOP/s"


def moment(wall: float | None) -> str:
    """Return a time of day for people."""
    if not wall:
        return "-"
    return datetime.datetime.fromtimestamp(wall).strftime("%Y-%m-%d %H:%M:%S")


def shown(path: Path) -> str:
    """Return a path relative to the working folder, if it is inside."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def log_line(console: Console, line: dict[str, Any], *, name: str, width: int = 0) -> None:
    """Print one line of a member behind its name for people, which takes at least `width`."""
    console.print(
        f"[dim]{escape(f'{name:<{width}}')}[/] {escape(str(line['text']))}", soft_wrap=True
    )
