"""Files of jobs: whole or not at all, checked, inside their folder."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from atoll.errors import ConfigError, StorageFull, WireError
from atoll.hub.storage import upload
from atoll.hub.stores import Stores
from tests.hub.durable import with_stores


async def stream(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


def incoming(folder: Path) -> list[Path]:
    return list((folder / "jobs" / ".incoming").iterdir())


def test_a_file_comes_back_with_its_hash_and_its_size(tmp_path: Path) -> None:
    data = os.urandom(3 * 2**20 + 17)
    digest = hashlib.sha256(data).hexdigest()

    async def test(stores: Stores) -> None:
        chunks = [data[i : i + 100_000] for i in range(0, len(data), 100_000)]
        put = await stores.files.put("j", "checkpoints/r1/a.bin", stream(*chunks), sha256=digest)
        assert (put.nbytes, put.sha256) == (len(data), digest)
        assert await stores.files.stat("j", "checkpoints/r1/a.bin") == put
        assert stores.files.path("j", "checkpoints/r1/a.bin").read_bytes() == data
        assert [info.name for info in await stores.files.list("j")] == ["checkpoints/r1/a.bin"]
        assert incoming(tmp_path) == []

    with_stores(tmp_path, test)


def test_a_wrong_hash_leaves_the_old_file(tmp_path: Path) -> None:
    async def test(stores: Stores) -> None:
        await stores.files.write("j", "a", b"old")
        with pytest.raises(WireError, match=r"arrived damaged.*send it again"):
            await stores.files.put("j", "a", stream(b"new"), sha256="0" * 64)
        assert stores.files.path("j", "a").read_bytes() == b"old"
        assert incoming(tmp_path) == []

    with_stores(tmp_path, test)


def test_a_sender_that_breaks_off_leaves_the_old_file(tmp_path: Path) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"half"
        raise ConnectionResetError

    async def test(stores: Stores) -> None:
        await stores.files.write("j", "a", b"old")
        with pytest.raises(Exception, match="cannot be written"):
            await stores.files.put("j", "a", broken())
        assert stores.files.path("j", "a").read_bytes() == b"old"
        assert incoming(tmp_path) == []

    with_stores(tmp_path, test)


def test_a_full_disk_is_told_and_the_old_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: BinaryIO, hasher: Any, block: bytes) -> None:
        with open("/dev/full", "wb", buffering=0) as device:
            device.write(block)

    async def test(stores: Stores) -> None:
        await stores.files.write("j", "a", b"old")
        monkeypatch.setattr(upload, "_write_block", full)
        with pytest.raises(StorageFull, match="what was stored before is untouched"):
            await stores.files.put("j", "a", stream(b"new"))
        assert stores.files.path("j", "a").read_bytes() == b"old"
        assert incoming(tmp_path) == []

    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with_stores(tmp_path, test)


def test_what_a_crash_left_half_is_removed_at_the_next_start(tmp_path: Path) -> None:
    async def first(stores: Stores) -> None:
        (tmp_path / "jobs" / ".incoming" / "half").write_bytes(b"x")

    async def second(stores: Stores) -> None:
        assert incoming(tmp_path) == []

    with_stores(tmp_path, first)
    with_stores(tmp_path, second)


@pytest.mark.parametrize(
    "name",
    ["../x", "a/../../x", "/etc/passwd", "", "a//b", ".incoming", "a/.git", "a\\..\\b", "a\0b",
     "a/" * 9 + "b", "x" * 200, "~root", "a/..", "CON:x"],
)  # fmt: skip
def test_paths_that_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    async def test(stores: Stores) -> None:
        with pytest.raises(ConfigError, match="cannot be a file of a job"):
            await stores.files.put("j", name, stream(b"x"))
        with pytest.raises(ConfigError, match="cannot be a file of a job"):
            await stores.files.stat("j", name)

    with_stores(tmp_path, test)


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="needs symbolic links")
def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    async def test(stores: Stores) -> None:
        await stores.files.write("j", "a", b"x")
        (tmp_path / "jobs" / "j" / "out").symlink_to(tmp_path)
        with pytest.raises(ConfigError):
            stores.files.path("j", "out/secret")

    with_stores(tmp_path, test)


def test_a_file_changed_behind_the_hubs_back_gets_its_true_hash(tmp_path: Path) -> None:
    async def test(stores: Stores) -> None:
        await stores.files.write("j", "a", b"one")
        stores.files.path("j", "a").write_bytes(b"other")
        info = await stores.files.stat("j", "a")
        assert info is not None
        assert info.sha256 == hashlib.sha256(b"other").hexdigest()
        shutil.rmtree(tmp_path / "jobs" / "j")
        assert await stores.files.stat("j", "a") is None
        assert await stores.files.list("j") == []

    with_stores(tmp_path, test)
