"""Folders of this machine that a container sees: only those that the owner has listed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from atoll.errors import ConfigError, NotAllowed

_FORM = "HOST:CONTAINER or HOST:CONTAINER:ro, both absolute and without .."


@dataclass(frozen=True, slots=True)
class Mount:
    """One folder of the machine inside a container."""

    source: Path
    """Where it is on the machine, all links resolved."""
    target: str
    read_only: bool


def parse_mounts(wanted: Sequence[str], *, allowed: Sequence[str]) -> list[Mount]:
    """Return the mounts that a job asks for.

    A folder is allowed when, with all links resolved, it is one of the owner's or lies below one.
    An owner's entry that ends in ``:ro`` gives its folder for reading only.

    Raises:
        ConfigError: a mount is written wrongly, or its folder does not exist.
        NotAllowed: the owner has not listed it.
    """
    return [_parse(text, allowed) for text in wanted]


def _parse(text: str, allowed: Sequence[str]) -> Mount:
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    if mode not in ("", "ro", "rw") or not _is_plain(source) or not _is_plain(target):
        raise ConfigError("a mount is written wrongly", given=repr(text), expected=_FORM)
    read_only = mode == "ro"
    try:
        real = Path(source).resolve(strict=True)
    except (OSError, RuntimeError):
        real = None
    # Whoever may not have a folder does not learn whether it exists.
    if real is None or not any(_covers(entry, real, read_only=read_only) for entry in allowed):
        raise NotAllowed(
            "this machine's owner does not allow a mount",
            given=repr(text),
            expected=f"a folder that exists, below one of {', '.join(allowed)}"
            if allowed
            else "no mounts at all",
            remedy="ask the owner to add the folder to `mounts` of the node's policy",
        )
    return Mount(real, target, read_only)


def _is_plain(path: str) -> bool:
    """Return whether a path is absolute and never goes up."""
    pure = PurePosixPath(path)
    return pure.is_absolute() and ".." not in pure.parts and pure != PurePosixPath("/")


def _covers(entry: str, real: Path, *, read_only: bool) -> bool:
    folder, _, mode = entry.partition(":")
    if mode == "ro" and not read_only:
        return False
    try:
        root = Path(folder).resolve(strict=True)
    except (OSError, RuntimeError):
        return False
    return real.is_relative_to(root)
