"""Folders of checkpoints: which are complete, and which go."""

from __future__ import annotations

from pathlib import Path

from atoll.hub.storage.checkpoint_folders import abandon, newest_complete, prune
from atoll.wire.manifest import (
    MANIFEST_NAME,
    Manifest,
    ManifestPart,
    checkpoint_folder,
    encode_manifest,
)
from atoll.wire.part_check import newest_good
from atoll.wire.retention import Keep


def make(
    folder: Path,
    round_: int,
    *,
    manifest: bool = True,
    parts: bool = True,
    score: float | None = None,
) -> None:
    path = folder / checkpoint_folder(round_)
    path.mkdir(parents=True)
    if parts:
        (path / "shared.safetensors").write_bytes(b"12345")
    if manifest:
        part = ManifestPart(name="shared.safetensors", member="w0", sha256="0" * 64, nbytes=5)
        written = Manifest(
            job="j", round=round_, step=1, members=["w0"], parts=[part], created=0.0, score=score
        )  # fmt: skip
        (path / MANIFEST_NAME).write_bytes(encode_manifest(written))


def test_newest_complete_passes_over_what_is_damaged(tmp_path: Path) -> None:
    assert newest_complete(tmp_path) == -1
    make(tmp_path, 1)
    make(tmp_path, 2, parts=False)
    make(tmp_path, 3, manifest=False)
    make(tmp_path, 4)
    (tmp_path / checkpoint_folder(4) / MANIFEST_NAME).write_bytes(b"{")
    make(tmp_path, 5)
    (tmp_path / checkpoint_folder(5) / "shared.safetensors").write_bytes(b"1")
    assert newest_complete(tmp_path) == 1


def test_pruning_never_deletes_the_newest_complete_one(tmp_path: Path) -> None:
    for round_ in (1, 2, 3):
        make(tmp_path, round_)
    make(tmp_path, 4, manifest=False)
    assert prune(tmp_path, keep=Keep(newest=1)) == [1, 2]
    assert newest_complete(tmp_path) == 3
    assert (tmp_path / checkpoint_folder(4)).exists()
    assert prune(tmp_path, keep=Keep(newest=1)) == []


def test_the_best_and_every_nth_are_kept_beside_the_newest(tmp_path: Path) -> None:
    for round_, score in enumerate((3.0, 1.0, 2.0, None, 2.0, 4.0), start=1):
        make(tmp_path, round_, score=score)
    assert prune(tmp_path, keep=Keep(newest=1, every=4, best=2)) == [1, 3]
    assert newest_complete(tmp_path) == 6


def test_later_checkpoints_are_deleted_and_older_ones_stay(tmp_path: Path) -> None:
    for round_ in (1, 2, 3):
        make(tmp_path, round_, manifest=round_ != 2)
    assert abandon(tmp_path, after=1) == [2, 3]
    assert abandon(tmp_path, after=1) == []
    assert newest_complete(tmp_path) == 1
    assert abandon(tmp_path, after=-1) == [1]


def test_a_manifest_of_other_bytes_is_damaged_and_no_error(tmp_path: Path) -> None:
    make(tmp_path, 1)
    make(tmp_path, 2)
    manifest = tmp_path / checkpoint_folder(2) / MANIFEST_NAME
    manifest.write_bytes(manifest.read_bytes().replace(b"w0", b"\xff0"))
    assert newest_complete(tmp_path) == 1
    good = newest_good(tmp_path, [2])
    assert (good.round, good.damaged[0].round) == (-1, 2)
    assert prune(tmp_path, keep=Keep(newest=1)) == []


def test_a_folder_with_odd_digits_is_no_round(tmp_path: Path) -> None:
    make(tmp_path, 1)
    (tmp_path / "checkpoints" / "round-²").mkdir()
    assert newest_complete(tmp_path) == 1
