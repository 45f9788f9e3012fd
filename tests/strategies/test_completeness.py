"""Nothing may be forgotten: every row of every table has its suite, its golden, its words."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from atoll.group.aggregation import COLLECTIVES as COLLECTIVE_NAMES
from atoll.methods.codecs import CODECS, CodecRow
from atoll.methods.method import Preset
from atoll.methods.parts import ADMISSIONS, AGGREGATES, COLLECTIVES, Entry
from atoll.methods.periodic import DiLoCo
from atoll.methods.table import METHODS, PRESETS
from tests.contracts.codec_suite import CodecSuite
from tests.contracts.collected import collect, suites, suites_of
from tests.contracts.strategy_suite import GOLDEN

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("outer", METHODS)
def test_every_outer_strategy_has_a_contract_suite(outer: str) -> None:
    options = METHODS[outer]
    assert suites_of(options), f"no StrategySuite in tests/strategies has options of {options}"


def test_a_strategy_without_a_suite_would_be_found_out() -> None:
    @dataclasses.dataclass(frozen=True)
    class Forgotten(DiLoCo):
        """Not even the suites of what it is made from count for it."""

    assert suites_of(DiLoCo)
    assert not suites_of(Forgotten)


@pytest.mark.parametrize("outer", METHODS)
def test_every_outer_strategy_has_a_golden_trajectory(outer: str) -> None:
    for suite in suites_of(METHODS[outer]):
        assert (GOLDEN / f"{suite.name}.json").is_file(), f"{suite.__name__}: run --regenerate"


@pytest.mark.parametrize("outer", METHODS)
def test_every_outer_strategy_has_a_preset(outer: str) -> None:
    assert outer in {preset.outer for preset in PRESETS.values()}


def test_suites_have_names_of_their_own() -> None:
    names = [suite.name for suite in suites()]
    assert sorted(names) == sorted(set(names))


def test_no_golden_is_left_from_a_suite_that_went_away() -> None:
    written = {path.stem for path in GOLDEN.glob("*.json")}
    assert written <= {suite.name for suite in suites()} | other_goldens()


def other_goldens() -> set[str]:
    """Return goldens that tests outside the contract read by name."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    return {
        path.stem
        for path in GOLDEN.glob("*.json")
        if any(f'"{path.name}"' in text or f'golden="{path.stem}"' in text for text in texts)
    }


def test_catalogue_is_complete() -> None:
    from atoll.reducer import aggregation

    assert set(AGGREGATES) == set(aggregation.AGGREGATES)
    assert set(ADMISSIONS) == set(aggregation.ADMISSIONS)
    assert set(COLLECTIVES) == set(COLLECTIVE_NAMES)


@pytest.mark.parametrize("entry", PRESETS.values(), ids=PRESETS)
def test_every_method_has_a_page_that_speaks_of_it(entry: Preset) -> None:
    page = ROOT / entry.page
    assert page.is_file(), f"{entry.name} has no page {entry.page}"
    text = page.read_text(encoding="utf-8")
    assert entry.name in text
    for paper in entry.papers[:1]:
        assert paper.url in text, f"{entry.page} does not link {paper.url}"


@pytest.mark.parametrize("entry", [*CODECS.values(), *AGGREGATES.values(), *COLLECTIVES.values()])
def test_every_codec_aggregate_and_collective_is_on_its_page(entry: Entry | CodecRow) -> None:
    assert entry.name in (ROOT / entry.page).read_text(encoding="utf-8")


def test_every_page_of_a_method_is_that_of_a_preset() -> None:
    pages = {path for path in (ROOT / "docs" / "methods").rglob("*.md") if path.stem != "README"}
    assert pages <= {ROOT / entry.page for entry in PRESETS.values()}


def test_every_codec_has_a_run_of_the_codec_suite() -> None:
    specs = [getattr(suite, "spec", "") for suite in collect(CodecSuite, "codec")]
    tested = {name for spec in specs for name in re.findall(r"[a-z][a-z0-9_]*", spec)}
    assert CODECS.keys() <= tested
