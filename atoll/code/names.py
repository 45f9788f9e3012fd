"""Which names and sizes a pack may have: the same for those who pack and those who unpack."""

from __future__ import annotations

import re
import unicodedata

MAX_FILES = 20_000
MAX_BYTES = 2**30
"""Bytes of all files together."""

MAX_RATIO = 200
"""How much larger the files may be than the pack, beyond `FREE_BYTES`."""

FREE_BYTES = 64 * 2**20
"""Bytes that may come out of a pack of any size: a log or a table of zeros packs very well."""

_FORBIDDEN = re.compile(r'[\x00-\x1f\x7f\\:*?"<>|\ud800-\udfff]')
_RESERVED = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?")


def bytes_allowed(packed_bytes: int) -> int:
    """Return how many bytes may come out of a pack of that size."""
    return min(MAX_BYTES, FREE_BYTES + MAX_RATIO * packed_bytes)


def name_problem(name: str) -> str:
    """Return why a path cannot be a file of a pack on every machine; empty when it can."""
    if not name or name.startswith("/"):
        return "it is no path inside a folder"
    if found := _FORBIDDEN.search(name):
        return f"it has {found[0]!r}, which not every system allows"
    for part in name.split("/"):
        if part in ("", ".", ".."):
            return "it is no path inside a folder"
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
    """Return prefix and name as the header of an archive holds them, 155 and 100 bytes at most.

    Raises:
        ValueError: the name is too long for that.
    """
    if len(name.encode()) <= 100:
        return "", name
    for position in range(1, len(name)):
        prefix, rest = name[:position], name[position + 1 :]
        short = len(prefix.encode()) <= 155 and len(rest.encode()) <= 100
        if name[position] == "/" and short:
            return prefix, rest
    raise ValueError(name)


class Names:
    """The names of a pack so far: no two may be the same file on some machine."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, bool]] = {}
        """What every system tells apart -> the name as it was written, and whether it is a file."""
        self._files: set[str] = set()

    def clash(self, name: str) -> str:
        """Take in one more name; return why it cannot be beside the others, or nothing."""
        parts = name.split("/")
        for depth in range(1, len(parts) + 1):
            path, is_file = "/".join(parts[:depth]), depth == len(parts)
            key = unicodedata.normalize("NFC", path).casefold()
            known, was_file = self._known.setdefault(key, (path, is_file))
            if known != path:
                return f"some systems cannot tell it from {known!r}"
            if was_file and not is_file:
                return f"{known!r} is a file already"
            if is_file and not was_file:
                return f"{known!r} is a folder already"
        if name in self._files:
            return "it is there twice"
        self._files.add(name)
        return ""
