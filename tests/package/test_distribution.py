"""The sdist and the wheel: what they contain, and what they say about themselves."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="pip install 'atoll[dev]'")
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from trove_classifiers import classifiers

import atoll
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ASSETS = {".html", ".js", ".css", ".toml", ".typed"}
"""Files of the package that are not Python."""


@dataclass(frozen=True)
class Built:
    """Contents by name, without what the archive adds itself."""

    sdist: Mapping[str, bytes]
    wheel: Mapping[str, bytes]

    @property
    def metadata(self) -> Metadata:
        (name,) = (name for name in self.wheel if name.endswith(".dist-info/METADATA"))
        return Metadata.from_email(self.wheel[name], validate=True)


def build(source: Path, target: Path) -> Path:
    """Build both from a folder; return where they are."""
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(target)],
        cwd=source, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def wheel_in(folder: Path) -> dict[str, bytes]:
    (path,) = folder.glob("atoll-*-py3-none-any.whl")
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Both as this source makes them; the wheel is made a second time, from the sdist."""
    folder = build(ROOT, tmp_path_factory.mktemp("dist"))
    (path,) = folder.glob("atoll-*.tar.gz")
    unpacked = tmp_path_factory.mktemp("sdist")
    with tarfile.open(path) as archive:
        archive.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    files = (file for file in source.rglob("*") if file.is_file())
    sdist = {file.relative_to(source).as_posix(): file.read_bytes() for file in files}
    wheel = wheel_in(folder)
    assert wheel_in(build(source, source / "dist")) == wheel
    return Built(sdist, wheel)


def test_wheel_and_sdist_have_every_file_of_the_package(built: Built) -> None:
    ours = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "atoll").rglob("*")
        if path.suffix in {".py", *ASSETS}
    }
    assert {Path(name).suffix for name in ours} == {".py", *ASSETS}
    assert {name for name in built.wheel if name.startswith("atoll/")} == ours
    assert {name for name in built.sdist if name.startswith("atoll/")} == ours


def test_neither_has_tests_benchmarks_or_private_folders(built: Built) -> None:
    assert {name.partition("/")[0] for name in built.wheel} == {
        "atoll", f"atoll-{atoll.__version__}.dist-info",
    }  # fmt: skip
    assert {name for name in built.sdist if not name.startswith("atoll/")} == {
        ".gitignore", "CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "constraints.txt",
        "pyproject.toml",
    }  # fmt: skip


def test_metadata_is_valid_and_says_what_the_project_says(built: Built) -> None:
    found = built.metadata
    assert (found.name, str(found.version)) == ("atoll", atoll.__version__)
    assert set(found.classifiers or ()) <= classifiers
    assert found.description == (ROOT / "README.md").read_text(encoding="utf-8")
    assert found.description_content_type == "text/markdown"
    assert any(name.endswith("/licenses/LICENSE") for name in built.wheel)
    (points,) = (text for name, text in built.wheel.items() if name.endswith("entry_points.txt"))
    assert points.decode().split() == ["[console_scripts]", "atoll", "=", "atoll.cli.main:main"]


def test_no_extra_but_train_brings_torch_to_a_hub(built: Built) -> None:
    heavy = {"torch", "numpy", "transformers", "gymnasium", "tokenizers", "lightning"}
    base = [one for one in built.metadata.requires_dist or () if one.marker is None]
    assert {one.name for one in base} & heavy == set()
    extras = {
        extra: {Requirement(text).name for text in rows}
        for extra, rows in PROJECT["optional-dependencies"].items()
    }
    assert {"train", "rl", "hf"} <= extras.keys()
    assert "torch" in extras["train"]
    assert extras["train"] & {"transformers", "gymnasium", "lightning"} == set()


def test_versions_of_python_are_the_same_everywhere() -> None:
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    flow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    assert named == ["3.11", "3.12", "3.13", "3.14"]
    assert PROJECT["requires-python"] == f">={named[0]}"
    matrices = [re.findall(r'"(3\.\d+)"', row) for row in re.findall(r"python: \[(.*)\]", flow)]
    assert matrices
    assert all(matrix == named for matrix in matrices)
