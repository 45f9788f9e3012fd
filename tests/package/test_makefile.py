"""What the Makefile installs for which target, and with what; nothing is installed here."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


class Clone:
    """What a fresh clone has of this, with programs of its own to install with."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.programs = folder, folder / "programs"
        self.programs.mkdir()
        for name in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, folder / name)
        for name in ("cp", "mkdir", "touch"):
            (self.programs / name).symlink_to(shutil.which(name) or name)

    def program(self, name: str, script: str) -> None:
        """Put a program on the path that notes how it was called."""
        path = self.programs / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >> "{self.folder}/called"\n{script}\n')
        path.chmod(0o755)

    def make(self, *words: str) -> str:
        done = subprocess.run(
            [shutil.which("make") or "make", *words], cwd=self.folder, text=True,
            env={"PATH": str(self.programs)}, timeout=PATIENCE_S, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout

    def called(self) -> list[str]:
        """Return how programs were called since the last time, in order."""
        path = self.folder / "called"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    """A clone whose Python makes environments in which everything works and nothing is."""
    made = Clone(tmp_path)
    made.program("inner", "")
    made.program("python3", "mkdir -p .venv/bin; cp programs/inner .venv/bin/python")
    return made


def installed(lines: list[str]) -> list[str]:
    return [found[1] for line in lines if (found := re.search(r"-e \.\[(.*)\]$", line))]


@pytest.mark.parametrize(
    ("target", "extras"), [("demo", "train"), ("rl-demo", "rl,box2d"), ("install", "dev")]
)
def test_a_target_installs_only_what_it_needs(clone: Clone, target: str, extras: str) -> None:
    said = clone.make("-n", target)
    assert set(re.findall(r'"\.\[(.*?)\]"', said)) == {extras}


def test_pip_installs_where_there_is_no_uv(clone: Clone) -> None:
    clone.make(".venv/.train")
    assert clone.called() == [
        "python3 -m venv .venv",
        "inner -m pip install -q --no-compile --disable-pip-version-check -c constraints.txt "
        "-e .[train]",
    ]
    clone.make(".venv/.train")
    assert clone.called() == []


def test_uv_installs_where_it_is_and_pip_where_uv_fails(clone: Clone) -> None:
    clone.program("uv", "mkdir -p .venv")
    clone.make(".venv/.train")
    made, put = clone.called()
    assert made.startswith("uv venv ")
    assert put.startswith("uv pip install ")
    assert installed([put]) == ["train"]
    clone.program("uv", '[ "$1" = venv ]')
    clone.make(".venv/.rl,box2d")
    lines = clone.called()
    assert [line.split()[0] for line in lines] == ["uv", "uv", "python3", "inner"]
    assert installed(lines) == ["rl,box2d", "rl,box2d"]


def test_a_developers_environment_serves_every_target(clone: Clone) -> None:
    clone.make("install")
    assert installed(clone.called()) == ["dev"]
    for target in ("demo", "rl-demo", "install"):
        assert "pip install" not in clone.make("-n", target)
