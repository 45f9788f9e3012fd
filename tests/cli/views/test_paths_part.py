"""The paths of a modular model in a terminal of 80 columns."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from atoll.cli.views.job import Watched
from atoll.cli.views.live import View
from atoll.cli.views.paths import paths_part
from atoll.cli.views.tables import job_table
from tests.cli.views.test_tables import job, shown


def path(number: int, state: str, **more: Any) -> dict[str, Any]:
    return {
        "path": number, "modules": [0, number], "state": state, "member": f"w{number}",
        "name": f"lap{number}",
        "node": "a-machine-with-a-rather-long-name", "step": 12_000, "tokens": 98_304_000,
        "loss": 2.31, "held_out": 2.5, "best": 2.4, "best_step": 11_850, "stopped_early": False,
        "documents": 1234, "shard_tokens": 99_000,
    } | more  # fmt: skip


def module(number: int, **more: Any) -> dict[str, Any]:
    held = ["a-machine-with-a-rather-long-name", "attic (w1)"]
    return {"module": number, "paths": [0, 1, 2, 8], "holders": held, "round": 80} | more


PATHS: dict[str, Any] = {
    "phase": 80, "phases": 100, "modules": [2, 2], "copies": 1, "empty": [2, 3],
    "levels": [[module(0), module(1, holders=[])], [module(0, round=None), module(1)]],
    "paths": [path(0, "done", stopped_early=True), path(1, "training", held_out=None,
              best=None, best_step=None), path(2, "waiting", documents=0), path(3, "trained")],
}  # fmt: skip


def test_every_line_of_paths_fits_eighty_columns() -> None:
    text = shown(paths_part(PATHS))
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(map(len, lines)) <= 80
    assert lines[0] == "phase 80 of 100  modules 2 x 2"
    assert "empty shards: 2-3" in lines
    rows = [line.split() for line in lines]
    row = ["0", "lap0", "done", "12000", "98.3", "M", "2.310", "2.500", "2.400", "11850", "1234"]
    assert row in rows
    assert ["0", "1", "80", "0-2,", "8", "none"] in rows
    assert ["1", "lap1", "training", "12000", "98.3", "M", "2.310", "-", "-", "1234"] in rows


def test_without_an_assignment_there_are_no_documents() -> None:
    paths = PATHS | {"empty": [], "paths": [path(0, "done", documents=None)]}
    assert "docs" not in shown(paths_part(paths))


def test_status_and_the_live_view_show_the_paths() -> None:
    view = job("modular", "running", kind="trainer", paths=PATHS)
    assert "modules 2 x 2" in shown(job_table(view))
    console = Console(width=80, record=True)
    drawn = shown(
        View(console, dashboard="x")._picture(Watched("modular", view=view), dashboard="x")
    )
    assert "phase 80 of 100" in drawn
    assert max(map(len, drawn.splitlines())) <= 80


def test_many_paths_name_how_many_are_left_out() -> None:
    many = PATHS | {"paths": [path(number, "waiting") for number in range(256)]}
    assert "and 224 more paths, on the page" in shown(paths_part(many))


def test_256_paths_take_a_screen_or_two() -> None:
    sizes = [16, 16]
    holders = [f"host{number}" for number in range(16)]
    levels = [[module(n, paths=list(range(16)), holders=holders) for n in range(16)] for _ in sizes]
    paths = [path(number, "training") for number in range(256)]
    text = shown(paths_part(PATHS | {"modules": sizes, "levels": levels, "paths": paths}))
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(map(len, lines)) <= 80
    assert len(lines) < 150
    assert "and 224 more paths, on the page" in lines
    assert "and 10 more" in " ".join(text.split())
