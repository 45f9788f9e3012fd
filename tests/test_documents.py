"""What the documents promise about tests exists."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest

from atoll import config
from atoll.config.rl_tables import PolicyTable, RlTable

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
GUIDES = ["docs/develop/where_is_what.md", "docs/architecture.md", "CONTRIBUTING.md"]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def promises_in(path: Path) -> set[str]:
    """Return the names of all test functions of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return {node.name for node in found if node.name.startswith("test_")}


@pytest.mark.parametrize("name", PAGES)
def test_every_test_that_a_document_names_exists(name: str) -> None:
    missing = [
        f"{path}::{test}"
        for path, test in NAMED.findall((DOCS / name).read_text(encoding="utf-8"))
        if not (ROOT / path).is_file() or test not in promises_in(ROOT / path)
    ]
    assert not missing


@pytest.mark.parametrize("page", GUIDES)
def test_every_path_that_a_guide_to_the_code_names_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    paths = re.findall(r"`((?:atoll|tests|docs|bench|examples)/[\w/.-]+)`", text)
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_glossary_has_one_meaning_per_word() -> None:
    text = (DOCS / "reference" / "glossary.md").read_text(encoding="utf-8")
    words = re.findall(r"^\| \*\*([^*]+)\*\* \|", text, re.MULTILINE)
    assert len(words) >= 30
    assert words == sorted(set(words), key=str.casefold)
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        assert "docs/reference/glossary.md" in page.read_text(encoding="utf-8")


def test_every_invariant_is_numbered_and_held_by_a_test() -> None:
    text = (ROOT / "docs" / "reference" / "protocol.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| I(\d+) \|(.*)$", text, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, len(rows) + 1))
    assert len(rows) >= 12
    assert all(NAMED.search(row) for _, row in rows)


def test_every_placement_key_is_documented() -> None:
    text = (ROOT / "docs" / "guide" / "jobs.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    tables = (config.JobTable, config.NeedsTable, config.LaunchTable)
    assert rows == {field.name for table in tables for field in dataclasses.fields(table)}


def test_every_key_of_policies_is_documented() -> None:
    text = (ROOT / "docs" / "guide" / "rl.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", text, re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"\w+", cell)}
    fields = [*dataclasses.fields(RlTable), *dataclasses.fields(PolicyTable)]
    assert {field.name for field in fields} - {"policies"} <= named


def test_the_index_links_every_page_that_a_reader_may_want() -> None:
    text = (DOCS / "README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([^)#]+\.md)[^)]*\)", text))
    own_index = {page for page in PAGES if page.startswith(("methods/", "decisions/"))}
    assert set(PAGES) - own_index - {"README.md"} <= linked


def test_readme_fits_what_it_says_on_its_first_screen() -> None:
    """One sentence, three commands, a small picture, three figures, six rows."""
    first = (ROOT / "README.md").read_text(encoding="utf-8").partition("## ")[0]
    blocks = [block.strip() for block in first.split("\n\n")]
    assert blocks[1].count(". ") == 0
    assert len(re.findall(r"(?m)^    atoll \w+", first)) == 3
    (picture,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", first)
    assert (ROOT / picture).stat().st_size < 200_000
    rows = [line for line in first.splitlines() if line.startswith("| ") and line != "| | |"]
    assert sum(line.startswith("| **") for line in rows) == 3
    assert sum(line.startswith("| [") for line in rows) == 6


@pytest.mark.parametrize("place", ["README.md", "Makefile", "atoll/cli/commands/demo.py"])
def test_all_say_the_same_of_how_long_the_demo_takes(place: str) -> None:
    assert "about two minutes" in (ROOT / place).read_text(encoding="utf-8")
    assert "three minutes" not in (ROOT / place).read_text(encoding="utf-8")


def test_example_says_where_it_may_be_submitted() -> None:
    """A node may not submit jobs: its login is a node's."""
    head = (ROOT / "examples" / "gpt.toml").read_text(encoding="utf-8").partition("[job]")[0]
    assert "on the hub's machine, or where an operator has logged in" in head
    assert "on any of them" not in head


@pytest.mark.parametrize("name", ["demo", "rl"])
def test_pictures_of_terminals_move_and_have_no_spaced_letters(name: str) -> None:
    drawn = (DOCS / "guide" / f"{name}.svg").read_text(encoding="utf-8")
    assert drawn.count('<g class="f"') >= 10
    assert drawn.count('<g class="last"') == 1
    assert "prefers-reduced-motion: reduce" in drawn
    assert "textLength" not in drawn
    assert "letter-spacing" not in drawn
    assert len(drawn) < 400_000
    assert "?token" not in drawn
