"""Packs: the same files make the same pack, and what comes out is what went in."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.code import names, pack, packing, unpack
from atoll.code.ignore import NEVER, NEVER_AT_ROOT, included_files
from atoll.errors import ConfigError, StorageFull
from tests.tiers import examples


def write(root: Path, **files: bytes) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (root / name).write_bytes(content)
    return root


def tree(root: Path) -> dict[str, bytes]:
    files = (path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}


def test_unpacked_folder_keeps_bytes_and_execute_bits(tmp_path: Path) -> None:
    source = write(tmp_path / "source", a=b"one", b=b"", c=os.urandom(700_000))
    (source / "deep" / "er").mkdir(parents=True)
    (source / "deep" / "er" / "run.sh").write_bytes(b"#!/bin/sh\n")
    (source / "deep" / "er" / "run.sh").chmod(0o700)
    with pack(source) as packed:
        assert packed.files == 4
        assert packed.nbytes == packed.path.stat().st_size
        assert packed.sha256 == hashlib.sha256(packed.path.read_bytes()).hexdigest()
        assert unpack(packed.path, tmp_path / "target") == 4
    assert not packed.path.exists()
    assert tree(tmp_path / "target") == tree(source)
    modes = [
        (tmp_path / "target" / name).stat().st_mode & 0o777 for name in ("a", "deep/er/run.sh")
    ]
    assert modes == [0o644, 0o755]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]


def test_time_owner_and_order_of_writing_do_not_matter(tmp_path: Path) -> None:
    first = write(tmp_path / "first", a=b"1", b=b"2")
    second = write(tmp_path / "second", b=b"2", a=b"1")
    os.utime(second / "a", (1, 1))
    (second / "a").chmod(0o604)
    with pack(first) as one, pack(second) as other:
        assert one.sha256 == other.sha256
        with tarfile.open(one.path) as archive:  # any tar can read it
            assert archive.getnames() == ["a", "b"]
    (second / "a").write_bytes(b"3")
    with pack(second) as changed:
        assert changed.sha256 != one.sha256


def test_a_pack_from_windows_equals_one_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "source", a=b"#!/bin/sh\n", b=b"#", c=b"")
    (source / "a").chmod(0o755)
    with pack(source) as here:
        (source / "a").chmod(0o666)  # Windows says so of every file
        monkeypatch.setattr(packing, "FILES_HAVE_MODES", False)
        with pack(source) as there:
            assert there.sha256 == here.sha256


def test_rules_with_line_ends_of_windows_are_those_rules(tmp_path: Path) -> None:
    one = write(tmp_path / "one", a=b"1", b=b"2", **{".atollignore": b"b\n# why\n"})
    other = write(tmp_path / "other", a=b"1", b=b"2", **{".atollignore": b"b\r\n# why\r\n"})
    assert [name for name, _ in included_files(one)] == [".atollignore", "a"]
    assert [name for name, _ in included_files(other)] == [".atollignore", "a"]


parts = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20
)
files = st.dictionaries(
    st.lists(parts, min_size=1, max_size=4).map("/".join), st.binary(max_size=2000), min_size=1
)


@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(files=files)
def test_whatever_can_travel_arrives(tmp_path: Path, files: dict[str, bytes]) -> None:
    known = names.Names()
    fitting = {
        name: content
        for name, content in files.items()
        if not names.name_problem(name)
        and not known.clash(name)
        and not ({".gitignore", ".atollignore", *NEVER, *NEVER_AT_ROOT} & {*name.split("/")})
    }
    source, target = tmp_path / "source", tmp_path / "target"
    for folder in (source, target):
        shutil.rmtree(folder, ignore_errors=True)
    source.mkdir()
    for name, content in fitting.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(content)
    if not fitting:
        return
    with pack(source) as packed:
        assert unpack(packed.path, target) == len(fitting)
    assert tree(target) == fitting


def test_a_link_to_a_file_of_the_folder_travels_as_that_file(tmp_path: Path) -> None:
    source = write(tmp_path / "source", a=b"one")
    (source / "link").symlink_to("a")
    with pack(source) as packed:
        unpack(packed.path, tmp_path / "target")
    assert not (tmp_path / "target" / "link").is_symlink()
    assert tree(tmp_path / "target") == {"a": b"one", "link": b"one"}


@pytest.mark.parametrize(
    ("leads_to", "told"),
    [
        ("../outside", "a symbolic link cannot be packed"),
        ("/etc/passwd", "a symbolic link cannot be packed"),
        ("folder", "a symbolic link cannot be packed"),
        ("nothing", "a symbolic link is broken"),
        ("loop", "a symbolic link is broken"),
    ],
)
def test_other_links_are_told_and_can_be_left_out(tmp_path: Path, leads_to: str, told: str) -> None:
    source = write(tmp_path / "source", a=b"one")
    (source / "folder").mkdir()
    write(tmp_path, outside=b"secret")
    (source / "loop").symlink_to(leads_to)
    with pytest.raises(ConfigError, match=told):
        pack(source)
    (source / ".atollignore").write_text("loop\n")
    with pack(source) as packed:
        assert packed.files == 2


def test_a_pipe_is_told(tmp_path: Path) -> None:
    if not hasattr(os, "mkfifo"):
        pytest.skip("this system has no pipes with names")
    source = write(tmp_path / "source", a=b"one")
    os.mkfifo(source / "pipe")
    with pytest.raises(ConfigError, match="a pipe, a socket or a device"):
        pack(source)


@pytest.mark.parametrize("name", ["a:b", "back\\slash", "tab\t", "aux.py", "dot.", "x" * 101])
def test_names_that_not_every_machine_can_have_are_told(tmp_path: Path, name: str) -> None:
    source = write(tmp_path / "source", **{name: b"one"})
    with pytest.raises(ConfigError, match=r"a file cannot be packed.*\.atollignore"):
        pack(source)


def test_names_that_differ_in_case_only_are_told(tmp_path: Path) -> None:
    source = write(tmp_path / "source", readme=b"one")
    if (source / "README").exists():
        pytest.skip("this file system does not tell them apart")
    write(source, README=b"two")
    with pytest.raises(ConfigError, match="some file systems cannot distinguish it from"):
        pack(source)


def test_nothing_at_all_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        pack(tmp_path / "nowhere")
    source = write(tmp_path / "source", a=b"one")
    (source / ".atollignore").write_text("*\n")
    with pytest.raises(ConfigError, match="has no files to pack"):
        pack(source)


def test_too_many_and_too_large_is_told_with_the_largest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "source", small=b"1", large=bytes(3_000_000), other=b"2")
    monkeypatch.setattr(names, "MAX_BYTES", 2_999_999)
    with pytest.raises(ConfigError, match=r"too large.*large \(3\.0 MB\)"):
        pack(source)
    monkeypatch.setattr(names, "MAX_BYTES", 2**30)
    monkeypatch.setattr(names, "MAX_FILES", 2)
    with pytest.raises(ConfigError, match="too large"):
        pack(source)


def test_what_would_be_refused_when_unpacked_is_not_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "FREE_BYTES", 1000)
    source = write(tmp_path / "source", zeros=bytes(5_000_000))
    with pytest.raises(ConfigError, match="compress too well"):
        pack(source)


def test_a_file_that_shrinks_meanwhile_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "source", a=b"one" * 1000)
    exactly = packing._exactly

    def shrinking(file: object, nbytes: int, name: str) -> object:
        os.truncate(source / "a", 5)
        return exactly(file, nbytes, name)  # type: ignore[arg-type]

    monkeypatch.setattr(packing, "_exactly", shrinking)
    with pytest.raises(ConfigError, match="changed while it was packed"):
        pack(source)


def test_a_full_disk_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "source", a=os.urandom(100_000))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))

    class Full(gzip.GzipFile):
        def write(self, data: object) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("atoll.code.packing.gzip.GzipFile", Full)
    with pytest.raises(StorageFull, match="free some disk space"):
        pack(source)
    assert list(temporary.iterdir()) == []


def test_a_file_that_vanishes_before_it_is_packed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "source", a=b"1", b=b"2")

    def vanishing(root: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
        for name, entry in included_files(root):
            if name == "b":
                (root / name).unlink()
            yield name, entry

    monkeypatch.setattr(packing, "included_files", vanishing)
    with pytest.raises(ConfigError, match=r"changed while it was packed.*b"):
        pack(source)


UNREADABLE = Path("/proc/self/mem")
"""Its first bytes cannot be read: EIO."""


@pytest.mark.skipif(not UNREADABLE.exists(), reason="a file of Linux")
def test_a_file_that_cannot_be_read_is_not_a_full_disk() -> None:
    file = packing._File("a", UNREADABLE, 1)
    with (
        UNREADABLE.open("rb", buffering=0) as source,
        pytest.raises(ConfigError, match=r"a file cannot be read.*mem"),
        packing._storage_errors(),
    ):
        next(packing._exactly(source, 1, file))
