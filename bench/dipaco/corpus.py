"""Text of several real domains, from what is installed on this machine."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

DOMAINS: tuple[tuple[str, str, str], ...] = (
    ("python", "stdlib", "*.py"),
    ("headers", "packages", "torch/include/ATen/**/*.h"),
    ("html", "share", "doc/**/*.html"),
    ("json", "packages", "**/*.json"),
    ("perl", "share", "perl/**/*.pm"),
    ("stubs", "packages", "**/*.pyi"),
    ("licences", "packages", "*.dist-info/**/LICENSE*"),
    ("xml", "share", "**/*.xml"),
    ("markdown", "share", "**/*.md"),
    ("vim", "share", "vim/**/*.vim"),
)
"""Name, where, and files; the first domains that are there are used."""

FEWEST = 4


def collect(
    folder: Path, names: Sequence[str] = (), *, domains: int, size: int, file_size: int
) -> list[str]:
    """Copy beginnings of real files to ``folder/DOMAIN/``; return the domains.

    Exits with words if fewer than four domains have enough text on this machine.

    Args:
        folder: Gets a folder for each domain.
        names: Of the domains that may be used; empty: all.
        domains: How many are used.
        size: Bytes of each domain.
        file_size: Most bytes of a file.
    """
    found: list[str] = []
    for name, where, pattern in DOMAINS:
        if len(found) == domains:
            break
        if names and name not in names:
            continue
        texts = list(_texts(_roots()[where], pattern, missing=size, most=file_size))
        if sum(map(len, texts)) < size:
            continue
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number, text in enumerate(texts):
            (folder / name / f"{number:04}.txt").write_bytes(text)
        found.append(name)
    if len(found) < FEWEST:
        sys.exit(f"bench.dipaco needs text of {FEWEST} domains; this machine has {found}")
    return found


def _roots() -> dict[str, Path]:
    paths = sysconfig.get_paths()
    return {
        "stdlib": Path(paths["stdlib"]),
        "packages": Path(paths["purelib"]),
        "share": Path("/usr/share"),
    }


def _texts(root: Path, pattern: str, *, missing: int, most: int) -> Iterator[bytes]:
    """Yield the beginnings of files, in order of their names, until there is enough."""
    for path in sorted(root.glob(pattern)):
        if missing <= 0:
            return
        if not path.is_file() or path.stat().st_size < 1000:
            continue
        text = path.read_bytes()[: min(most, missing)]
        missing -= len(text)
        yield text
