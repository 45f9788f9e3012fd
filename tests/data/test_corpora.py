import os
from pathlib import Path

import pytest

from atoll.data import load_corpus
from atoll.errors import ConfigError, DataError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes" / "deep").mkdir(parents=True)
    (tmp_path / "notes" / "b.txt").write_bytes(b"second")
    (tmp_path / "notes" / "a.txt").write_bytes(b"first")
    (tmp_path / "notes" / "deep" / "c.txt").write_bytes(b"\xff\x00third")
    return tmp_path


def test_standard_library_corpus_has_several_domains() -> None:
    corpus = load_corpus("stdlib")
    assert corpus.num_bytes > 1_000_000
    assert {"asyncio", "email", "modules"} <= set(corpus.domains)
    assert b"def __init__(self" in corpus.text


def test_standard_library_leaves_out_tests_and_packages() -> None:
    names = [document.name for document in load_corpus("stdlib").documents]
    assert names == sorted(names)
    assert "argparse.py" in names
    for part in ("site-packages", "test", "encodings"):
        assert not any(part in name.split("/")[:-1] for name in names)
    assert not any(name.startswith(("_sysconfigdata", "config-")) for name in names)


def test_globs_reach_into_folders_in_order_of_names(folder: Path) -> None:
    corpus = load_corpus("files:notes/**/*.txt")
    assert [d.name for d in corpus.documents] == ["notes/a.txt", "notes/b.txt", "notes/deep/c.txt"]
    assert [d.domain for d in corpus.documents] == ["notes", "notes", "deep"]
    assert corpus.text == b"first\nsecond\n\xff\x00third"


def test_absolute_globs_and_folders_named_like_files(folder: Path) -> None:
    (folder / "notes" / "folder.txt").mkdir()
    assert len(load_corpus(f"files:{folder}/notes/*.txt").documents) == 2


def test_glob_without_files_is_named(folder: Path) -> None:
    with pytest.raises(DataError, match=r"no file matches.*files:notes/\*\.md.*relative ones"):
        load_corpus("files:notes/*.md")


def test_files_without_text_are_named(folder: Path) -> None:
    (folder / "empty.md").touch()
    with pytest.raises(DataError, match=r"corpus is empty.*1 files, 0 bytes"):
        load_corpus("files:*.md")


def test_missing_glob_is_explained() -> None:
    with pytest.raises(DataError, match=r"no files named.*for example files:"):
        load_corpus("files:")


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root reads every file")
def test_unreadable_file_is_named(folder: Path) -> None:
    (folder / "notes" / "a.txt").chmod(0)
    with pytest.raises(DataError, match=r"cannot be read.*notes/a\.txt.*[Pp]ermission"):
        load_corpus("files:notes/*.txt")


def test_file_that_vanishes_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(self: Path) -> bytes:
        raise FileNotFoundError(2, "No such file or directory", str(self))

    monkeypatch.setattr(Path, "read_bytes", gone)
    with pytest.raises(DataError, match=r"cannot be read.*a\.txt.*No such file"):
        load_corpus("files:notes/a.txt")


def test_python_without_sources_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match=r"without the sources.*files:GLOB"):
        load_corpus("stdlib")


@pytest.mark.parametrize(("given", "meant"), [("stdlibs", "stdlib"), ("file:*.txt", "files")])
def test_unknown_corpus_names_the_nearest(given: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown corpus.*did you mean '{meant}'"):
        load_corpus(given)
