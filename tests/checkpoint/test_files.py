"""A file is there whole or not at all; a full disk is reported and leaves the old one."""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.checkpoint.files import Buffer, hash_file, write_file
from atoll.errors import StorageFull
from tests.patience import PATIENCE_S
from tests.small_disk import small_disk

MEGABYTE = bytes(2**20)


def test_hash_and_size_are_those_of_the_bytes(tmp_path: Path) -> None:
    blocks: list[Buffer] = [b"abc", bytearray(3_000_000), memoryview(b"x")]
    written = write_file(tmp_path / "deep" / "file", blocks)
    data = (tmp_path / "deep" / "file").read_bytes()
    assert data == b"".join(blocks)
    assert (written.nbytes, written.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert hash_file(tmp_path / "deep" / "file") == written


def test_file_is_synced_before_rename_and_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def spied_fsync(handle: int) -> None:
        calls.append("folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "file")
        fsync(handle)

    def spied_replace(source: str, target: Path) -> None:
        calls.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", spied_fsync)
    monkeypatch.setattr(os, "replace", spied_replace)
    write_file(tmp_path / "file", [b"abc"])
    assert calls == ["file", "rename", "folder"]


def test_failing_writer_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    def blocks() -> Iterator[bytes]:
        yield b"new"
        raise ValueError("the producer failed")

    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(ValueError, match="producer"):
        write_file(tmp_path / "file", blocks())
    assert (tmp_path / "file").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_full_disk_is_told_and_the_old_file_stays(tmp_path: Path) -> None:
    with small_disk(tmp_path, nbytes=2 * 2**20):
        write_file(tmp_path / "file", [MEGABYTE])
        before = hash_file(tmp_path / "file")
        with pytest.raises(StorageFull, match=r"disk is full.*given: .*file.*free some disk space"):
            write_file(tmp_path / "file", [MEGABYTE] * 3)
        assert hash_file(tmp_path / "file") == before
        assert os.listdir(tmp_path) == ["file"]
        assert shutil.disk_usage(tmp_path).free >= 2**20
        write_file(tmp_path / "other", [b"there is room again"])


@pytest.mark.skipif(sys.platform == "win32", reason="needs resource limits")
def test_file_size_limit_is_told_and_the_old_file_stays(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    script = f"""
import resource
from pathlib import Path
from atoll.checkpoint.files import write_file
from atoll.errors import StorageFull
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
try:
    write_file(Path({str(tmp_path)!r}) / "file", [bytes(2**19)] * 8)
except StorageFull as error:
    raise SystemExit(0 if "file" in str(error) else 3)
raise SystemExit(4)
"""
    assert resource.RLIMIT_FSIZE >= 0
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=PATIENCE_S)
    assert done.returncode == 0
    assert (tmp_path / "file").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]
