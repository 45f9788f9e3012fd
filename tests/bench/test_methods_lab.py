"""Wall times of rows in the network lab: which are cut, which count, one of them for real."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.netlab.lab import Lab
from bench.methods import lab
from bench.methods.ledger import Ledger
from bench.methods.modelled import Clock
from bench.methods.rows import ROWS, named
from bench.methods.setting import FULL
from bench.slowlink import site

DILOCO = named("diloco/int8")[0]


def run_of(row: str, *, exchanges: list[list[int]], members: int = 4) -> dict[str, object]:
    return {
        "kind": "run", "row": row, "members": members, "seed": 0, "steps": FULL.steps,
        "scale": FULL.scale, "exchanges": exchanges,
    }  # fmt: skip


def ended(out: Path, **contributors: list[list[int]]) -> list[dict[str, object]]:
    """Return what counts where members wrote these contributors of a warm row and of rows."""
    out.mkdir(exist_ok=True)
    for number, (member, rows) in enumerate(contributors.items()):
        lines = [
            {"row": f"row {index}", "seconds": 1.0 + number, "contributors": found}
            for index, found in enumerate([[4], *rows])
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (out / f"{member}.jsonl").write_text(text, encoding="utf-8")
    return lab._ended(out)


def test_a_row_counts_when_all_members_have_ended_it_together(tmp_path: Path) -> None:
    whole, less = [[4], []], [[4], [3]]
    found = ended(tmp_path / "all", w0=whole, w1=whole, w2=whole, w3=[[4]])
    assert [(line["row"], line["seconds"]) for line in found] == [("row 1", 4.0)]
    found = ended(tmp_path / "lost", w0=whole, w1=less, w2=less, w3=less)
    assert [line["row"] for line in found] == ["row 1"]
    assert ended(tmp_path / "few", w0=whole, w1=whole) == []


def test_a_row_that_takes_too_long_is_cut(tmp_path: Path) -> None:
    every_step = named("ddp")[0]
    assert lab.steps_of(every_step, 100.0, longest_s=400.0) == FULL.steps
    assert lab.steps_of(every_step, 4000.0, longest_s=400.0) == 20
    assert lab.steps_of(DILOCO, 4000.0, longest_s=400.0) == FULL.steps
    ledger = Ledger(tmp_path / "rows.jsonl")
    with pytest.raises(SystemExit, match="no run of 'diloco/int8'"):
        lab.modelled_s(DILOCO, ledger, rate_bps=1e6, clock=Clock())
    ledger.add(run_of("diloco/int8", exchanges=[[125_000, 125_000, 10]], members=8))
    ledger.add(run_of("diloco/int8", exchanges=[[125_000, 125_000, 20]]))
    clock = Clock(step_s=0.1, round_trip_s=0.5)
    assert lab.modelled_s(DILOCO, ledger, rate_bps=1e6, clock=clock) == pytest.approx(60 + 50)


def test_the_first_rows_are_those_of_the_table() -> None:
    assert [row.name for row in ROWS[: lab.FIRST]][:4] == ["alone", "ddp", "diloco", "diloco/int8"]


@pytest.mark.long(
    "tests/bench/test_methods.py::test_a_wall_time_that_was_measured_replaces_the_modelled_one"
)
def test_rows_on_real_lines_send_what_they_send_in_memory() -> None:
    if reason := Lab.unavailable():
        pytest.skip(reason)
    with site(100) as place:
        wanted = [(row, 30, 5.0) for row in named("local-sgd,ddp/int8")]
        found = list(lab.measure(place, wanted, route="relay", step_s=0.005))
    assert [line["row"] for line in found] == ["local-sgd", "ddp/int8"]
    elements = 1_017_216
    for line, nbytes in zip(found, (2 * 4, 30), strict=True):  # two rounds of fp32, 30 of int8
        assert line["contributors"] == [4]
        assert line["sent_bytes"] == pytest.approx(nbytes * elements, rel=0.03)
