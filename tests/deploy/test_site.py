"""The documentation becomes a site with every page in its navigation and no broken link."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S

pytest.importorskip("mkdocs", reason="the extra docs is not installed")

from deploy import site

DOCS = site.DOCS


def leaves(navigation: Any) -> set[str]:
    """Return the addresses of the pages of a navigation."""
    if isinstance(navigation, str):
        return {navigation}
    parts = navigation.values() if isinstance(navigation, dict) else navigation
    return set().union(*(leaves(part) for part in parts))


def test_every_page_is_in_the_navigation() -> None:
    config: Any = type("Config", (), {"nav": None})()
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    named = leaves(site.on_config(config).nav)
    assert pages <= named
    assert named - pages == {"files/README.md", *site.REFERENCE.values()}


def test_command_line_reference_has_every_command() -> None:
    text = site.command_line()
    named = re.findall(r"^## `atoll ([a-z -]+)`$", text, re.MULTILINE)
    assert {"run", "join", "ticket new", "scaling fit"} <= set(named)
    assert named == sorted(named)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 3 for row in rows)


def test_python_reference_has_every_public_name() -> None:
    text = site.python_names()
    for name in ("DiLoCo", "Run", "join"):
        assert re.search(rf"^(## |::: [\w.]+\.){name}$", text, re.MULTILINE), name
    assert "| `every` | int | `500` |" in text


def test_links_out_of_the_documentation_stay_in_the_site() -> None:
    linked = set(site.outside("docs/guide/models.md"))
    assert "examples/fine_tune.toml" in linked
    assert site.page_text("examples/fine_tune.toml").startswith("# examples/fine_tune.toml\n")


@pytest.mark.long("tests/test_public_names.py::test_documents_link_only_to_files_that_exist")
def test_site_builds_without_a_warning_and_names_no_other_host(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path / "site")],
        cwd=site.ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True, text=True, timeout=10 * PATIENCE_S, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stdout + built.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > len(list(DOCS.rglob("*.md")))
    loads = re.compile(r'<(?:script|link|img)[^>]*(?:src|href)="?(https?:)?//')
    assert [page.name for page in pages if loads.search(page.read_text(encoding="utf-8"))] == []
