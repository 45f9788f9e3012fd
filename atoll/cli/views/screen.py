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
    return HarmlessConsole(highlight=False)


def errors() -> Console:
    """Return the console of standard error."""
    return HarmlessConsole(stderr=True, highlight=False)


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


def size(nbytes: float) -> str:
    """Return a number of bytes for people, e.g. ``1.5 MB`` (powers of ten)."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(nbytes) < 1000 or unit == "TB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    raise AssertionError("unreachable")


def count(number: float) -> str:
    """Return a large number for people, e.g. ``26.4 k``."""
    for unit in ("", " k", " M", " G"):
        if abs(number) < 1000 or unit == " G":
            return f"{number:.0f}" if not unit else f"{number:.1f}{unit}"
        number /= 1000
    raise AssertionError("unreachable")


def duration(seconds: float | None) -> str:
    """Return a span of time for people, e.g. ``2:05`` or ``1:02:05``."""
    if seconds is None:
        return "-"
    whole = max(0, round(seconds))
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


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


def log_line(console: Console, line: dict[str, Any]) -> None:
    """Print one line of a member."""
    console.print(
        f"[dim]{escape(str(line['member'])):>4}[/] {escape(str(line['text']))}", soft_wrap=True
    )
