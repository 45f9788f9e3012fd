"""The files of a folder that are sent to nodes: gitignore(5) patterns, matched by pathspec.

As in git, nothing inside an ignored folder can be included again. Named classes such as
`[[:alpha:]]` are refused, because pathspec 1.1 reads them differently.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from pathspec import GitIgnoreSpec
from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

from atoll.errors import ConfigError

OWN_RULES = ".atollignore"
GIT_RULES = ".gitignore"

NEVER = frozenset({".git", "__pycache__", ".venv"})

NEVER_AT_ROOT = frozenset({"runs"})
"""Names that are ignored directly in the folder."""

MAX_RULES_BYTES = 2**20


class Rules:
    """An ordered list of patterns."""

    def __init__(self, lines: Iterable[str]) -> None:
        """Read one pattern per line; like git, skip invalid ones. Raises ConfigError."""
        self._spec = GitIgnoreSpec([found for line in lines if (found := _pattern(line))])

    def verdict(self, path: str, *, folder: bool) -> bool | None:
        """Return whether the last matching pattern selects a relative path; None: none matches."""
        return self._spec.check_file(f"{path}/" if folder else path).include

    def takes(self, path: str) -> bool:
        """Return whether the patterns select a file, or a folder above it."""
        taken, parts = False, path.split("/")
        for depth in range(1, len(parts) + 1):
            verdict = self.verdict("/".join(parts[:depth]), folder=depth < len(parts))
            taken = taken if verdict is None else verdict
        return taken


def _pattern(line: str) -> GitIgnoreSpecPattern | None:
    """Return the pattern in a line; None if it contains none."""
    if "[:" in line:
        raise ConfigError(
            "a pattern has a named class",
            given=line,
            expected="letters in brackets, e.g. [A-Za-z]",
            remedy=f"write the letters, or give the folder a file {OWN_RULES}",
        )
    try:
        with warnings.catch_warnings():  # re warns of `[[`, which it reads as git does
            warnings.simplefilter("ignore", FutureWarning)
            found = GitIgnoreSpecPattern(line.removesuffix("\r"))
    except (ValueError, re.error):
        return None
    return found if found.include is not None else None


class _Level:
    def __init__(self, folder: Path, name: str) -> None:
        self.rules = Rules(_lines(folder / name))
        self.folder = folder

    def verdict(self, path: Path, *, folder: bool) -> bool | None:
        return self.rules.verdict(path.relative_to(self.folder).as_posix(), folder=folder)


def included_files(root: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield the files to pack, by name: relative path with slashes, and entry.

    `.atollignore` files apply if there is one in `root`, otherwise `.gitignore` files, including
    those above `root` up to the root of its repository. Raises ConfigError if a file is unreadable.
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
    try:
        if path.is_symlink() or not path.is_file():
            return []
        if path.stat().st_size > MAX_RULES_BYTES:
            raise ConfigError("a file of rules is too large", given=str(path))
        return path.read_text("utf-8", "surrogateescape").split("\n")
    except OSError as error:
        raise ConfigError("a file of rules cannot be read", given=f"{path} ({error})") from error
