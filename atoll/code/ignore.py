"""Patterns of files as in gitignore(5): which match, and which part of a folder travels.

The last pattern that matches decides; `!` turns a pattern round; one that ends in `/` is about
folders; one with a `/` before its end is about a path from where the rules lie, any other about a
name at any depth; `*`, `?` and `[...]` stay within a name, `**` spans folders. What lies in a
folder that is left out is never looked at, so it cannot be brought back.

Written here because pathspec 1.1 differs from git in brackets: `[[:alpha:]]` becomes another
expression, `[z-a]` and a lone `!` raise, `[!a]` matches a slash. The tests compare with git.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from atoll.errors import ConfigError

OWN_RULES = ".atollignore"
GIT_RULES = ".gitignore"

NEVER = frozenset({".git", "__pycache__", ".venv"})
"""Names that never travel."""

NEVER_AT_ROOT = frozenset({"runs"})
"""Names that never travel when they lie directly in the folder."""

MAX_RULES_BYTES = 2**20
"""Largest file of rules."""

_CLASSES = {
    "alnum": "0-9A-Za-z", "alpha": "A-Za-z", "blank": " \\t", "cntrl": "\\x00-\\x1f\\x7f",
    "digit": "0-9", "graph": "\\x21-\\x7e", "lower": "a-z", "print": "\\x20-\\x7e",
    "punct": "\\x21-\\x2f\\x3a-\\x40\\x5b-\\x60\\x7b-\\x7e", "space": "\\x09-\\x0d ",
    "upper": "A-Z", "xdigit": "0-9A-Fa-f",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Rule:
    matches: re.Pattern[str]
    names: bool
    """About a name at any depth, not a path."""
    folders: bool
    """About folders only."""
    takes: bool
    """False for a pattern with `!`."""


class Rules:
    """An ordered list of patterns."""

    def __init__(self, lines: Iterable[str]) -> None:
        """Read patterns, one a line; empty lines and those with `#` in front say nothing."""
        self._rules = [rule for line in lines if (rule := _rule(line)) is not None]

    def verdict(self, path: str, *, folder: bool) -> bool | None:
        """Return whether the patterns take a path; None when none is about it.

        Args:
            path: From where the rules lie, with slashes.
            folder: Whether it is a folder.
        """
        name = path.rpartition("/")[2]
        for rule in reversed(self._rules):
            if rule.folders and not folder:
                continue
            if rule.matches.fullmatch(name if rule.names else path):
                return rule.takes
        return None

    def takes(self, path: str) -> bool:
        """Return whether the patterns take a file, or a folder above it."""
        taken, parts = False, path.split("/")
        for depth in range(1, len(parts) + 1):
            verdict = self.verdict("/".join(parts[:depth]), folder=depth < len(parts))
            taken = taken if verdict is None else verdict
        return taken


class _Level:
    """The rules of one folder, for paths below it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.rules = Rules(_lines(folder / name))
        self.folder = folder

    def verdict(self, path: Path, *, folder: bool) -> bool | None:
        return self.rules.verdict(path.relative_to(self.folder).as_posix(), folder=folder)


def included_files(root: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield what of a folder travels, by name: its path with slashes, and what it is.

    `.atollignore` files decide when there is one in `root`, `.gitignore` files otherwise; those
    above `root`, up to the root of its repository, count too.

    Raises:
        ConfigError: a folder or a file of rules cannot be read.
    """
    root = root.resolve()
    own = (root / OWN_RULES).is_file()
    name = OWN_RULES if own else GIT_RULES
    above = [] if own else [_Level(folder, name) for folder in _above(root)]
    yield from _walk(root, root, name, above)


def _walk(
    root: Path, folder: Path, name: str, above: list[_Level]
) -> Iterator[tuple[str, os.DirEntry[str]]]:
    levels = [*above, _Level(folder, name)]
    try:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except OSError as error:
        raise ConfigError("a folder cannot be read", given=f"{folder} ({error})") from error
    for entry in entries:
        is_folder = entry.is_dir(follow_symlinks=False)
        if entry.name in NEVER or (folder == root and entry.name in NEVER_AT_ROOT):
            continue
        path = folder / entry.name
        verdicts = (level.verdict(path, folder=is_folder) for level in reversed(levels))
        if next((verdict for verdict in verdicts if verdict is not None), False):
            continue
        if is_folder:
            yield from _walk(root, path, name, levels)
        else:
            yield PurePosixPath(path.relative_to(root)).as_posix(), entry


def _above(root: Path) -> list[Path]:
    """Return the folders between a folder and the root of its repository, outermost first."""
    if (root / ".git").exists():
        return []
    for depth, folder in enumerate(root.parents):
        if (folder / ".git").exists():
            return list(root.parents[: depth + 1])[::-1]
    return []


def _lines(path: Path) -> list[str]:
    """Return the patterns in a file; none when there is no file."""
    try:
        if path.is_symlink() or not path.is_file():
            return []
        if path.stat().st_size > MAX_RULES_BYTES:
            raise ConfigError("a file of rules is too large", given=str(path))
        return path.read_text("utf-8", "surrogateescape").split("\n")
    except OSError as error:
        raise ConfigError("a file of rules cannot be read", given=f"{path} ({error})") from error


def _rule(line: str) -> _Rule | None:
    """Return a pattern, or None when the line says nothing or can never match."""
    line = line.removesuffix("\r")
    if line.startswith("#"):
        return None
    while line.endswith(" ") and not _escaped(line, len(line) - 1):
        line = line[:-1]
    takes = not line.startswith("!")
    line = line if takes else line[1:]
    folders = line.endswith("/")
    line = line[:-1] if folders else line
    if not line:
        return None
    names = "/" not in line
    translated = _translate(line.removeprefix("/"))
    if translated is None:
        return None
    return _Rule(re.compile(translated, re.DOTALL), names, folders, takes)


def _escaped(text: str, position: int) -> bool:
    """Return whether an odd number of backslashes stands before a position."""
    before = text[:position]
    return (len(before) - len(before.rstrip("\\"))) % 2 == 1


def _translate(glob: str) -> str | None:
    """Return the regular expression of a glob; None when it can never match."""
    pieces: list[str] = []
    position = 0
    while position < len(glob):
        letter = glob[position]
        if letter == "*":
            piece, position = _stars(glob, position)
        elif letter == "?":
            piece, position = "[^/]", position + 1
        elif letter == "[":
            found = _bracket(glob, position + 1)
            if found is None:
                return None
            piece, position = found
        elif letter == "\\":
            if position + 1 == len(glob):
                return None
            piece, position = re.escape(glob[position + 1]), position + 2
        else:
            piece, position = re.escape(letter), position + 1
        pieces.append(piece)
    return "".join(pieces)


def _stars(glob: str, start: int) -> tuple[str, int]:
    """Translate one star or more; return the expression and where they end."""
    end = start
    while end < len(glob) and glob[end] == "*":
        end += 1
    begins = start == 0 or glob[start - 1] == "/"
    if end - start == 1 or not begins or (end < len(glob) and glob[end] != "/"):
        return "[^/]*", end
    if end == len(glob):
        return ".*", end
    return "(?:.*/)?", end + 1


def _bracket(glob: str, start: int) -> tuple[str, int] | None:
    """Translate `[...]`; return the expression and where it ends, None when it has no end."""
    position, negated = start, False
    if glob[position : position + 1] in ("!", "^"):
        position, negated = position + 1, True
    inside, first = "", True
    while True:
        if position >= len(glob):
            return None
        if glob[position] == "]" and not first:
            break
        first = False
        if glob.startswith("[:", position):
            end = glob.find(":]", position + 2)
            if end < 0 or glob[position + 2 : end] not in _CLASSES:
                return None
            inside, position = inside + _CLASSES[glob[position + 2 : end]], end + 2
            continue
        low, position = _letter(glob, position)
        high = low
        if glob[position : position + 1] == "-" and glob[position + 1 : position + 2] not in (
            "]",
            "",
        ):
            high, position = _letter(glob, position + 1)
        if not low or not high:
            return None
        if low <= high:
            inside += f"{re.escape(low)}-{re.escape(high)}"
    if not inside:
        return ("[^/]" if negated else "(?!)"), position + 1
    return f"(?!/)[{'^' if negated else ''}{inside}]", position + 1


def _letter(glob: str, position: int) -> tuple[str, int]:
    """Return a letter of a bracket, with its backslash taken off, and where it ends."""
    if glob[position] == "\\":
        return glob[position + 1 : position + 2], position + 2
    return glob[position], position + 1
