"""Packs that somebody made to do harm: each is refused, and nothing of it stays."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.code import names, pack, unpack
from atoll.errors import StorageFull, WireError
from tests.tiers import examples

END = bytes(2 * tarfile.BLOCKSIZE)


def member(name: str, content: bytes = b"x", **fields: object) -> bytes:
    """Return header and content of one file, with other fields where they are named."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    padding = bytes(-len(content) % tarfile.BLOCKSIZE)
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape") + content + padding


def packed(folder: Path, *members: bytes, end: bytes = END) -> Path:
    path = folder / "pack.tar.gz"
    path.write_bytes(gzip.compress(b"".join(members) + end, mtime=0))
    return path


def refused(folder: Path, source: Path, reason: str) -> None:
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(WireError, match=reason):
        unpack(source, folder / "target")
    assert sorted(path.name for path in folder.iterdir()) == before


def test_a_plain_archive_of_another_program_is_unpacked(tmp_path: Path) -> None:
    source = packed(tmp_path, member("a", b"one"), member("b/c", b"two", mode=0o4755, uid=0))
    assert unpack(source, tmp_path / "target") == 2
    assert (tmp_path / "target/b/c").read_bytes() == b"two"
    assert (tmp_path / "target/b/c").stat().st_mode & 0o7777 == 0o755


@pytest.mark.parametrize(
    "name",
    ["../evil", "a/../../evil", "/etc/evil", "..", ".", "./a", "a//b", "a/.", "a\\..\\b", "C:evil",
     "a\nb", "nul", "con.txt", "a.", "a ", "a/" + "b" * 101],
)  # fmt: skip
def test_names_that_lead_elsewhere_or_are_not_for_every_machine(tmp_path: Path, name: str) -> None:
    refused(tmp_path, packed(tmp_path, member("first"), member(name)), "a pack of code is refused")


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (tarfile.SYMTYPE, "link"), (tarfile.LNKTYPE, "link"), (tarfile.CHRTYPE, "device"),
        (tarfile.BLKTYPE, "device"), (tarfile.FIFOTYPE, "pipe"), (tarfile.DIRTYPE, "folder"),
        (tarfile.CONTTYPE, "type"), (tarfile.GNUTYPE_SPARSE, "type"), (tarfile.XHDTYPE, "type"),
        (tarfile.XGLTYPE, "type"), (tarfile.GNUTYPE_LONGNAME, "type"), (b"Z", "type"),
    ],
)  # fmt: skip
def test_what_is_no_plain_file(tmp_path: Path, kind: bytes, told: str) -> None:
    evil = member("evil", b"", type=kind, linkname="/etc/passwd")
    refused(tmp_path, packed(tmp_path, member("first"), evil), f"is not a file but a .*{told}")


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ("a", "a", "it occurs twice"),
        ("a", "A", "cannot distinguish it from"),
        ("folder/a", "Folder/b", "cannot distinguish it from"),
        ("\u00e9", "e\u0301", "cannot distinguish it from"),
        ("a", "a/b", "is a file already"),
        ("a/b", "a", "is a folder already"),
    ],
)
def test_names_that_are_the_same_file_somewhere(
    tmp_path: Path, first: str, second: str, told: str
) -> None:
    refused(tmp_path, packed(tmp_path, member(first), member(second)), told)


def test_a_bomb_of_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "FREE_BYTES", 2**20)
    source = packed(tmp_path, member("zeros", bytes(8 * 2**20)))
    assert source.stat().st_size < 2**15
    refused(tmp_path, source, "unpacks into more than")


def test_a_bomb_that_only_says_how_large_it_is(tmp_path: Path) -> None:
    header = tarfile.TarInfo("huge")
    header.size = 2**40
    refused(tmp_path, packed(tmp_path, header.tobuf(tarfile.GNU_FORMAT)), "unpacks into more than")
    header.size = names.MAX_BYTES - 1
    refused(tmp_path, packed(tmp_path, header.tobuf(tarfile.GNU_FORMAT)), "unpacks into more than")


def test_many_files_that_are_too_large_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "MAX_BYTES", 2500)
    files = [member(f"f{number}", os.urandom(1000)) for number in range(3)]
    assert unpack(packed(tmp_path, *files[:2]), tmp_path / "two") == 2
    refused(tmp_path, packed(tmp_path, *files), "unpacks into more than 2500 bytes")


def test_a_bomb_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "MAX_FILES", 10)
    files = [member(f"f{number}") for number in range(11)]
    refused(tmp_path, packed(tmp_path, *files), "more than 10 files")


def test_a_size_below_nothing(tmp_path: Path) -> None:
    refused(tmp_path, packed(tmp_path, member("a", b"", size=-1)), "unpacks into more than")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda data: data[:-20], "damaged|too early"),
        (lambda data: data[: len(data) // 2], "damaged|too early"),
        (lambda data: b"no gzip at all", "damaged"),
        (lambda data: b"", "too early|damaged"),
        (lambda data: data + b"more", "damaged|after its end"),
        (lambda data: data + gzip.compress(b"more"), "after its end"),
    ],
)
def test_a_damaged_pack(tmp_path: Path, damage: Callable[[bytes], bytes], told: str) -> None:
    source = packed(tmp_path, member("a", os.urandom(5000)))
    source.write_bytes(damage(source.read_bytes()))
    refused(tmp_path, source, told)


def test_an_archive_that_ends_within_a_file_or_has_no_end(tmp_path: Path) -> None:
    whole = member("a", b"x" * 1000)
    refused(tmp_path, packed(tmp_path, whole[:700], end=b""), "too early")
    refused(tmp_path, packed(tmp_path, whole, end=b""), "too early")
    refused(tmp_path, packed(tmp_path, whole, end=bytes(512) + b"\1" * 512), "after its end")


def test_a_header_with_a_wrong_sum(tmp_path: Path) -> None:
    header = bytearray(member("a"))
    header[0:1] = b"b"
    refused(tmp_path, packed(tmp_path, bytes(header)), "a header is damaged")


def test_a_folder_that_is_there_already_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "mine").write_text("kept")
    with pytest.raises(FileExistsError):
        unpack(packed(tmp_path, member("a")), tmp_path / "target")
    assert [path.name for path in (tmp_path / "target").iterdir()] == ["mine"]


def test_a_disk_that_takes_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    source = packed(tmp_path, member("a"))
    monkeypatch.setattr("os.fdopen", full)
    with pytest.raises(StorageFull, match="cannot be unpacked"):
        unpack(source, tmp_path / "target")
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["pack.tar.gz"]


@settings(
    max_examples=examples(200),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(noise=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 255)), max_size=6))
def test_noise_never_writes_outside_and_never_fails_otherwise(
    tmp_path: Path, noise: list[tuple[int, int]]
) -> None:
    source = tmp_path / "source"
    source.mkdir(exist_ok=True)
    (source / "a").write_bytes(bytes(range(256)) * 4)
    (source / "b").write_bytes(b"two")
    with pack(source) as good:
        data = bytearray(gzip.decompress(good.path.read_bytes()))
    for position, value in noise:
        data[position % len(data)] = value
    place = tmp_path / "place"
    place.mkdir(exist_ok=True)
    archive = io.BytesIO(gzip.compress(bytes(data), mtime=0)).getvalue()
    (tmp_path / "noisy").write_bytes(archive)
    try:
        unpack(tmp_path / "noisy", place / "target")
    except WireError:
        assert list(place.iterdir()) == []
        return
    assert [path.name for path in place.iterdir()] == ["target"]
    (place / "target").rename(tmp_path / f"done-{len(list(tmp_path.iterdir()))}")
