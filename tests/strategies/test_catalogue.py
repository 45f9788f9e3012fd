"""The catalogue: what it says of methods, and the figures beside the words."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from typing import Any

import pytest

from atoll.config import read_spec
from atoll.errors import ConfigError
from atoll.methods.codecs import CODECS
from atoll.methods.parts import ADMISSIONS, AGGREGATES, COLLECTIVES
from atoll.methods.table import METHODS, PRESETS
from atoll.strategies.resolve import resolve
from atoll.strategies.traffic_table import Scale, one_row, part_rows, rows
from tests.patience import PATIENCE_S

SCALE = Scale(parameters=1_000_000, peers=4, steps=100)
TABLES: list[Mapping[str, Any]] = [PRESETS, CODECS, AGGREGATES, COLLECTIVES, ADMISSIONS]


def test_entries_say_what_they_are_and_are_for() -> None:
    for table in TABLES:
        for entry in table.values():
            assert 10 <= len(entry.line) <= 95, entry.name
            assert 5 <= len(entry.good_for) <= 95, entry.name
            assert "\n" not in entry.line + entry.good_for


def test_papers_have_a_year_and_a_link_that_belongs_to_one_title() -> None:
    papers = [paper for table in TABLES for entry in table.values() for paper in entry.papers]
    assert len(papers) > 30
    titles: dict[str, set[str]] = {}
    for paper in papers:
        assert 1950 < paper.year < 2030
        assert paper.url.startswith("https://")
        titles.setdefault(paper.url, set()).add(paper.title)
    assert all(len(found) == 1 for found in titles.values()), titles


def test_arxiv_numbers_begin_with_the_year() -> None:
    for table in TABLES:
        for entry in table.values():
            for paper in entry.papers:
                if "arxiv.org/abs/" in paper.url:
                    written = 2000 + int(paper.url.rpartition("/")[2][:2])
                    assert written <= paper.year <= written + 1, paper


@pytest.mark.parametrize("outer", METHODS)
def test_every_option_has_a_default_and_a_line(outer: str) -> None:
    for option in METHODS[outer].options():
        assert isinstance(option.default, bool | int | float | str), option.name
        assert option.line.endswith((".", ")")), f"{option.name} of {outer} has no line"


def test_a_row_has_the_traffic_that_the_strategy_itself_tells() -> None:
    row = next(row for row in rows(SCALE) if row["name"] == "ddp")
    assert row["per_step"]["relay_sent"] == pytest.approx(4_000_000, rel=1e-4)
    assert row["rounds"] == 101


def test_the_shared_start_of_a_short_run_is_taken_into_account() -> None:
    short, long = (
        one_row("diloco", dataclasses.replace(SCALE, steps=steps)) for steps in (100, 1_000)
    )
    options = [{o["name"]: o["value"] for o in row["options"]} for row in (short, long)]
    assert [each["shared_steps"] for each in options] == [10, 100]


@pytest.mark.parametrize("name", [*PRESETS, *METHODS])
def test_what_is_to_be_pasted_is_a_job_file_that_means_the_same(name: str) -> None:
    row = one_row(name, SCALE)
    spec = read_spec(tomllib.loads(row["toml"]))
    resolved = resolve(spec.strategy)
    options = dataclasses.asdict(resolved.method)  # type: ignore[call-overload]
    assert options == {option["name"]: option["value"] for option in row["options"]}
    assert resolved.outer == row["outer"]


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'diloco'"):
        one_row("dilco", SCALE)


def test_defaults_without_torch_are_the_defaults() -> None:
    defaults = {option.name: option.default for option in METHODS["diloco"].options()}
    assert defaults["outer_lr"] == 0.7
    assert [row["name"] for row in part_rows("codecs", SCALE)][:2] == ["fp32", "fp16"]


def test_words_and_options_need_no_torch() -> None:
    program = (
        "import sys, atoll.strategies.traffic_table as w\n"
        "import atoll.strategies.compatibility\n"
        "from atoll.methods.table import METHODS\n"
        "[method.options() for method in METHODS.values()]\n"
        "w.part_rows('collectives', w.Scale(parameters=9, peers=2, steps=1))\n"
        "sys.exit('torch was loaded' if 'torch' in sys.modules else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------ the verb


def atoll(*words: str, width: int = 80) -> str:
    from typer.testing import CliRunner

    from atoll.cli.main import app

    done = CliRunner().invoke(app, ["methods", *words], env={"COLUMNS": str(width)})
    assert done.exit_code == 0, done.output
    return str(done.output)


@pytest.mark.parametrize("width", [80, 160])
def test_the_list_fits_the_screen_and_names_everything(width: int) -> None:
    text = atoll("--parameters", "1M", "--steps", "20", width=width)
    lines = text.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= width
    for name in PRESETS:
        assert any(line.startswith(name + " ") for line in lines), name
    assert ("paper" in lines[0]) is (width == 160)


@pytest.mark.parametrize("width", [80, 160])
def test_one_method_in_full_fits_the_screen(width: int) -> None:
    text = atoll("diloco", width=width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    for part in ("https://arxiv.org/abs/2311.08105", "outer_momentum", "[strategy]", "relay"):
        assert part in text


def test_without_torch_there_are_no_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else find(name)
    )
    assert "pip install 'atoll[train]'" in atoll("diloco")
    assert atoll("codecs").count("?") >= len(CODECS)


@pytest.mark.parametrize("kind", ["codecs", "aggregates", "collectives", "admission"])
def test_the_other_tables_are_listed(kind: str) -> None:
    lines = atoll(kind).splitlines()
    for row in part_rows(kind, SCALE):
        assert any(line.startswith(row["name"]) for line in lines)


def test_json_has_the_same_rows() -> None:
    found: Any = json.loads(atoll("--json", "--parameters", "115008", "--peers", "2"))
    assert [row["name"] for row in found] == list(PRESETS)
    assert {"name", "line", "good_for", "papers", "page", "per_step"} <= set(found[0])


@pytest.mark.parametrize(
    ("text", "number"), [("124M", 124_000_000), ("1.5b", 1_500_000_000), ("115_008", 115_008)]
)
def test_sizes_are_read_as_people_write_them(text: str, number: int) -> None:
    from atoll.cli.commands.methods import parse_count

    assert parse_count(text) == number


@pytest.mark.parametrize("text", ["", "M", "-3", "0", "nan", "1e99", "many"])
def test_what_is_no_size_is_refused(text: str) -> None:
    from atoll.cli.commands.methods import parse_count

    with pytest.raises(ConfigError, match="cannot be read"):
        parse_count(text)
