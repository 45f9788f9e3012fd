"""Checkpoints in a job's folder: finds complete ones, removes old ones, renames damaged ones."""

from __future__ import annotations

import shutil
from pathlib import Path

from atoll.errors import WireError
from atoll.wire.manifest import (
    DAMAGED,
    MANIFEST_NAME,
    checkpoint_folder,
    decode_manifest,
    round_of,
)
from atoll.wire.retention import Keep


def newest_complete(folder: Path) -> int:
    """Return the newest round with a readable manifest and all parts in full size, or -1."""
    for round_ in sorted(published(folder), reverse=True):
        if _is_complete(folder / checkpoint_folder(round_)):
            return round_
    return -1


def prune(folder: Path, *, keep: Keep) -> list[int]:
    """Delete the checkpoints before the newest complete one that `keep` does not retain.

    Returns their rounds. Older folders without a manifest are deleted too.
    """
    newest = newest_complete(folder)
    kept = keep.rounds({r: s for r, s in _scores(folder).items() if r <= newest}) | {newest}
    return _delete(folder, [r for r in _folders(folder) if r < newest and r not in kept])


def abandon(folder: Path, *, after: int) -> list[int]:
    """Delete every checkpoint after round `after`; return the deleted rounds."""
    return _delete(folder, [round_ for round_ in _folders(folder) if round_ > after])


def _folders(folder: Path) -> list[int]:
    paths = (folder / "checkpoints").glob("round-*")
    rounds = {round_of(path.name) for path in paths if path.is_dir()}
    return sorted(round_ for round_ in rounds if round_ is not None)


def published(folder: Path) -> list[int]:
    """Return the rounds with a manifest, ascending."""
    return [round_ for round_ in _folders(folder) if _manifest(folder, round_).is_file()]


def _scores(folder: Path) -> dict[int, float | None]:
    scores: dict[int, float | None] = {}
    for round_ in published(folder):
        try:
            scores[round_] = decode_manifest(_manifest(folder, round_).read_bytes()).score
        except (OSError, WireError):
            scores[round_] = None
    return scores


def _delete(folder: Path, rounds: list[int]) -> list[int]:
    """Delete checkpoints, manifest first, so that a partial one never looks complete."""
    for round_ in rounds:
        _manifest(folder, round_).unlink(missing_ok=True)
        shutil.rmtree(folder / checkpoint_folder(round_), ignore_errors=True)
    return rounds


def set_aside(folder: Path, round_: int) -> None:
    """Rename a damaged checkpoint, so that its round can be written again."""
    path = folder / checkpoint_folder(round_)
    aside = path.with_name(path.name + DAMAGED)
    shutil.rmtree(aside, ignore_errors=True)
    if path.exists():
        path.rename(aside)


def _manifest(folder: Path, round_: int) -> Path:
    return folder / checkpoint_folder(round_) / MANIFEST_NAME


def _is_complete(folder: Path) -> bool:
    try:
        manifest = decode_manifest((folder / MANIFEST_NAME).read_bytes())
        return all((folder / p.name).stat().st_size == p.nbytes for p in manifest.parts)
    except (OSError, WireError):
        return False
