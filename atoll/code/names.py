"""Names and sizes that a pack may have, enforced by packing and unpacking."""

from __future__ import annotations

import re
import unicodedata

MAX_FILES = 20_000
MAX_BYTES = 2**30

MAX_RATIO = 200
"""Maximum compression ratio beyond `FREE_BYTES`."""

FREE_BYTES = 64 * 2**20
"""Unpacked bytes allowed for a pack of any size: logs or tables of zeros compress very well."""

_FORBIDDEN = re.compile(r'[\x00-\x1f\x7f\\:*?"<>|\ud800-\udfff]')
_RESERVED = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?")


def bytes_allowed(packed_bytes: int) -> int:
    """Return how many unpacked bytes are allowed for a pack of this size."""
    return min(MAX_BYTES, FREE_BYTES + MAX_RATIO * packed_bytes)


def name_problem(name: str) -> str:
    """Return why a path is not portable; empty if it is."""
    if not name or name.startswith("/"):
        return "it is not a path inside the folder"
    if found := _FORBIDDEN.search(name):
        return f"it has {found[0]!r}, which not every system allows"
    for part in name.split("/"):
        if part in ("", ".", ".."):
            return "it is not a path inside the folder"
        if len(part.encode()) > 100:
            return "a part of it is longer than 100 bytes"
        if part[-1] in ". " or _RESERVED.fullmatch(part):
            return "Windows has no such names"
    try:
        split_name(name)
    except ValueError:
        return "it is too long"
    return ""


def split_name(name: str) -> tuple[str, str]:
    """Split into prefix (155 bytes) and name (100) for a ustar header; raises ValueError."""
    if len(name.encode()) <= 100:
        return "", name
    for position in range(1, len(name)):
        prefix, rest = name[:position], name[position + 1 :]
        short = len(prefix.encode()) <= 155 and len(rest.encode()) <= 100
        if name[position] == "/" and short:
            return prefix, rest
    raise ValueError(name)


class Names:
    """The names of a pack so far; no two may be the same file on any machine."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, bool]] = {}
        """Normalized path -> path as written, and whether it is a file."""
        self._files: set[str] = set()

    def clash(self, name: str) -> str:
        """Add a name; return why it conflicts with the others, or empty."""
        parts = name.split("/")
        for depth in range(1, len(parts) + 1):
            path, is_file = "/".join(parts[:depth]), depth == len(parts)
            key = unicodedata.normalize("NFC", path).casefold()
            known, was_file = self._known.setdefault(key, (path, is_file))
            if known != path:
                return f"some file systems cannot distinguish it from {known!r}"
            if was_file and not is_file:
                return f"{known!r} is a file already"
            if is_file and not was_file:
                return f"{known!r} is a folder already"
        if name in self._files:
            return "it occurs twice"
        self._files.add(name)
        return ""
