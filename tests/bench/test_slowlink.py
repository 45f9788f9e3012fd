"""What `bench.slowlink` makes of the lines that members wrote; the lines themselves need a lab."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from bench import slowlink
from bench.slowlink import QUICK, Plan, compare_with_alone, extrapolate, lines_of, row_of
from bench.slowlink_member import METHODS

PLAN = dataclasses.replace(QUICK, steps=30, step_s=0.1, target=2.0)


def lines(*, per_step: float, steps: int = 30, worked_s: float = 0.02) -> list[dict[str, Any]]:
    """A member's lines: `per_step` seconds each, a loss that falls by 0.1 per step from 4."""
    return [
        {
            "step": step, "seconds": step * per_step, "worked_s": worked_s, "sent_bytes": 10 * step,
            **({"loss": 4.0 - 0.1 * step} if step % 5 == 0 else {}),
        }
        for step in range(1, steps + 1)
    ]  # fmt: skip


def test_utilisation_is_the_share_of_the_time_that_was_computing() -> None:
    found = {"w0": lines(per_step=0.1), "w1": lines(per_step=0.2)}
    row = row_of(PLAN, "diloco", 20, found)
    assert row["utilisation"] == pytest.approx((1.0 + 0.5) / 2)
    assert row["seconds_to_loss"] == pytest.approx(2.0)  # w0 sees the target after step 20
    assert (row["strategy"], row["codec"], row["bytes_per_node"]) == (
        "diloco", "feedback(int8)", 300,
    )  # fmt: skip
    assert not row["cut"]


def test_arithmetic_that_a_busy_machine_slows_down_is_computing() -> None:
    row = row_of(PLAN, "alone", 20, {"w0": lines(per_step=0.3, worked_s=0.3)})
    assert row["utilisation"] == pytest.approx(1.0)


def test_rows_are_compared_at_their_own_compute_rate() -> None:
    rows = [
        row_of(PLAN, "alone", 20, {"w0": lines(per_step=0.125)}),
        row_of(PLAN, "streaming-diloco int4", 20, {"w0": lines(per_step=0.25)}),
        row_of(PLAN, "alone", 100, {"w0": lines(per_step=0.1)}),
    ]
    compare_with_alone(rows)
    assert [row["of_alone"] for row in rows] == [1.0, 0.5, 1.0]
    assert rows[1]["strategy"] == "streaming-diloco"


def test_what_was_cut_is_extrapolated_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    requested = []

    def needed(plan: Plan, method: str) -> int | None:
        requested.append(method)
        return 25

    monkeypatch.setattr(slowlink, "steps_needed", needed)
    slow = {"w0": lines(per_step=2.0, steps=12)}
    rows = [row_of(PLAN, "ddp", rate, slow) for rate in (20, 100)]
    rows.append(row_of(PLAN, "diloco", 20, {"w0": lines(per_step=0.1)}))
    extrapolate(PLAN, rows)
    assert requested == ["ddp"]  # once for both rates
    assert [(row["seconds_to_loss"], row["extrapolated"]) for row in rows] == [
        (50.0, True), (50.0, True), (2.0, False),
    ]  # fmt: skip


def test_a_line_that_is_still_being_written_is_not_read(tmp_path: Path) -> None:
    whole = json.dumps({"step": 1})
    (tmp_path / "w0.jsonl").write_text(f'{whole}\n{{"step": 2', encoding="utf-8")
    (tmp_path / "w1.jsonl").write_text("", encoding="utf-8")
    assert lines_of(tmp_path) == {"w0": [{"step": 1}]}


def test_methods_need_as_many_steps_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slowlink, "MEMBERS", 2)
    plan = dataclasses.replace(PLAN, steps=10, target=4.5)
    assert slowlink.steps_needed(plan, "ddp") in (5, 10)


def test_every_method_is_measured_and_data_parallel_is_cut_first() -> None:
    assert slowlink.FULL.methods == tuple(METHODS)
    assert set(QUICK.methods) < set(METHODS)
    assert QUICK.limit_of("ddp") < QUICK.limit_of("diloco")
