"""Every public name of `atoll` exists, has a docstring and is in the documents."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import atoll

ROOT = Path(__file__).resolve().parent.parent
API_PAGE = ROOT / "docs" / "reference" / "api.md"


@pytest.mark.parametrize("name", sorted(atoll.__all__))
def test_every_public_name_is_documented(name: str) -> None:
    value = getattr(atoll, name)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert inspect.getdoc(value), f"atoll.{name} has no docstring"
    assert f"`atoll.{name}" in API_PAGE.read_text(encoding="utf-8"), (
        f"{name} is not in docs/reference/api.md"
    )


def test_documents_link_only_to_files_that_exist() -> None:
    broken = []
    pages = [*ROOT.glob("*.md"), ROOT / "examples" / "README.md", *(ROOT / "docs").rglob("*.md")]
    for page in sorted(pages):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)} -> {target}")
    assert not broken, "\n".join(broken)


def test_the_project_names_no_machine_of_its_makers() -> None:
    strangers = re.compile(r"/root/|/home/\w+/|pyenv/versions")
    found = [
        str(path.relative_to(ROOT))
        for pattern in ("*.py", "*.md", "*.toml", "Makefile")
        for folder in ("atoll", "tests", "bench", "examples", "docs")
        for path in (ROOT / folder).rglob(pattern)
        if path != Path(__file__) and strangers.search(path.read_text(encoding="utf-8"))
    ]
    assert not found
