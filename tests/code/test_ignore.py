"""Patterns as in gitignore(5), held against git itself."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.code.ignore import Rules, included_files
from atoll.errors import ConfigError
from tests.tiers import examples


def make(root: Path, *names: str, **rules: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    for place, text in rules.items():
        (root / place.replace("_", "/")).parent.mkdir(parents=True, exist_ok=True)
        (root / place.replace("_", "/")).with_name(".gitignore").write_text(text)


def names(root: Path) -> list[str]:
    return sorted(name for name, _ in included_files(root))


def test_patterns_leave_out_what_git_would(tmp_path: Path) -> None:
    make(
        tmp_path,
        *["a.py", "a.log", "keep.log", "data/x.bin", "src/data/x.bin", "src/build/out.o"],
        *["src/b.py", "docs/deep/er/n.md", "docs/n.md"],
        x="*.log\n!keep.log\n/data/\nbuild/\ndocs/**/n.md\n# data\n\n",
    )
    assert names(tmp_path) == [".gitignore", "a.py", "keep.log", "src/b.py", "src/data/x.bin"]


def test_rules_further_down_decide_over_those_above(tmp_path: Path) -> None:
    make(tmp_path, "a.log", "sub/a.log", "sub/b.log", x="*.log", sub_x="!b.log")
    assert names(tmp_path) == [".gitignore", "sub/.gitignore", "sub/b.log"]


def test_ignored_folders_content_cannot_be_included(tmp_path: Path) -> None:
    make(tmp_path, "build/keep.txt", "a", x="build\n!build/keep.txt\n")
    assert names(tmp_path) == [".gitignore", "a"]


def test_own_rules_take_the_place_of_gits(tmp_path: Path) -> None:
    make(tmp_path, "a.py", "data.bin", "sub/data.bin", x="data.bin", sub_x="data.bin")
    (tmp_path / ".atollignore").write_text("a.py\n.gitignore\n")
    (tmp_path / "sub" / ".atollignore").write_text("data.bin")
    assert names(tmp_path) == [".atollignore", "data.bin", "sub/.atollignore"]


def test_rules_of_the_repository_above_count_too(tmp_path: Path) -> None:
    project = tmp_path / "repository" / "projects" / "mine"
    make(project, "a.py", "a.ckpt", "out/x")
    (tmp_path / ".gitignore").write_text("a.py")  # outside of the repository
    (tmp_path / "repository" / ".gitignore").write_text("*.ckpt\n/projects/mine/out\n")
    (tmp_path / "repository" / ".git").mkdir()
    assert names(project) == ["a.py"]


def test_some_things_never_travel(tmp_path: Path) -> None:
    make(
        tmp_path,
        *["a.py", ".git/config", "__pycache__/a.pyc", "sub/__pycache__/b.pyc", ".venv/bin/python"],
        *["runs/job/x", "sub/runs/kept", "sub/.git/HEAD"],
    )
    assert names(tmp_path) == ["a.py", "sub/runs/kept"]


def test_a_file_of_rules_that_is_no_file_of_rules_is_told(tmp_path: Path) -> None:
    (tmp_path / ".atollignore").write_bytes(b"x" * (2**20 + 1))
    with pytest.raises(ConfigError, match="too large"):
        names(tmp_path)


@pytest.mark.parametrize(
    ("patterns", "taken", "left"),
    [
        (["results/*.csv"], ["results/a.csv"], ["a.csv", "results/deep/a.csv", "x/results/a.csv"]),
        (["*.pt"], ["a.pt", "deep/er/b.pt"], ["a.pth"]),
        (["out/"], ["out/a", "x/out/deep/b"], ["out", "outer/a"]),
        (["*.log", "!debug.log"], ["a.log"], ["debug.log", "sub/debug.log"]),
        (["logs", "!logs/big.bin"], ["logs/a"], ["logs/big.bin"]),
        (["**/best/*"], ["best/a", "x/y/best/a", "x/best/y/z"], ["best", "x/best"]),
    ],
)
def test_a_list_of_patterns_takes_files(
    patterns: list[str], taken: list[str], left: list[str]
) -> None:
    rules = Rules(patterns)
    assert [name for name in [*taken, *left] if rules.takes(name)] == taken


def test_what_is_no_pattern_is_about_nothing() -> None:
    rules = Rules(["", "   ", "#a", "!", "/", "a[b", "x\\", "[z-a]"])
    assert [name for name in ["a", "#a", "!", "a[b", "x", "x\\", "b"] if rules.takes(name)] == []


def test_named_class_in_brackets_is_refused(tmp_path: Path) -> None:
    make(tmp_path, "a", x="[[:alpha:]]\n")
    with pytest.raises(ConfigError, match=r"named class.*alpha"):
        names(tmp_path)


ALPHABET = "ab.*?[]!^\\/-#c "
WORDS = ["a", "b", "ab", "c.a", "a b", "-", "#b", "!a", "[a]"]
FRAGMENTS = ["*", "**", "/", "?", "a", "b", "[ab]", "[!a]", "[a-c]", "\\a", "!", " "]

lines = st.one_of(
    st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=6).map("".join),
    st.text(ALPHABET, min_size=1, max_size=6),
    st.sampled_from(["*.a", "a/", "/a", "a/b", "**/b", "a/**", "a/**/b", "!b", "!a/", "*", "!*/"]),
)
paths = st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map("/".join)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git to compare with")
@settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    tree=st.sets(paths, min_size=1, max_size=10),
    rules=st.dictionaries(
        st.sampled_from(["", "a", "a/b", "b"]), st.lists(lines, min_size=1, max_size=5), max_size=3
    ),
)
def test_it_agrees_with_git(tmp_path: Path, tree: set[str], rules: dict[str, list[str]]) -> None:
    root = tmp_path / "tree"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    for name in sorted(tree, key=len):
        path = root / name
        if not any(parent.is_file() for parent in path.parents) and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
    for folder, patterns in rules.items():
        if (root / folder).is_dir():
            (root / folder / ".gitignore").write_text("\n".join(patterns))
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    git = ["git", "-c", "core.excludesFile=", "-c", "init.templateDir="]
    subprocess.run([*git, "init", "-q"], cwd=root, env=environment, check=True)
    listed = subprocess.run(
        [*git, "ls-files", "-z", "--others", "--exclude-standard"],
        cwd=root, env=environment, check=True, capture_output=True,
    ).stdout  # fmt: skip
    assert names(root) == sorted(name.decode() for name in listed.split(b"\0") if name)
