from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from atoll.train.report.paths import path_charts
from atoll.train.report.report import plotly_js, render, stretches, timeline_charts, write_report


def points() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for step in range(1, 4):
        for member in ("w0", "w1"):
            values = {
                "loss": 3.0 / step, "tokens_per_s": 100.0, "wall_s": 2.0 * step,
                "compute_s": 1.5 * step, "wait_s": 0.3 * step, "send_s": 0.1 * step,
                "sent_bytes": 10.0 * step,
            }  # fmt: skip
            found.append(
                {
                    "time": 5.0 + step,
                    "member": member,
                    "step": step,
                    "round": step,
                    "values": values,
                }
            )
    return found


def test_a_report_is_one_file_that_needs_no_network(tmp_path: Path) -> None:
    lines = "".join(json.dumps(p) + "\n" for p in points())
    (tmp_path / "metrics.jsonl").write_text(lines, encoding="utf-8")
    event = {"time": 6.0, "member": "w1", "kind": "member-lost", "text": "w1 was lost"}
    (tmp_path / "events.jsonl").write_text(json.dumps(event) + "\n", encoding="utf-8")
    summary = {
        "job": "demo", "nodes": 2, "parameters": 100, "loss_final": 1.25, "reduction": 219.4,
        "replicas_identical": True, "sample": "def hello():", "members": [{"member": "w0"}],
        "strategy": {"inner": "local", "outer": "diloco", "codec": "int8"},
    }  # fmt: skip
    (tmp_path / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    (tmp_path / "job.toml").write_text('name = "demo"', encoding="utf-8")
    page = write_report(tmp_path).read_text("utf-8").replace(plotly_js(), "")
    assert not re.search(r"(src|href)\s*=", page)
    for words in ("demo", "1.2500", "219×", "w1 was lost", "def hello():", "data parallel, fp32"):
        assert words in page


def test_a_run_that_left_nothing_still_gets_a_report(tmp_path: Path) -> None:
    assert "<h1>Atoll run</h1>" in write_report(tmp_path).read_text("utf-8")


def test_what_members_wrote_cannot_become_markup() -> None:
    evil = "</script><script>alert(1)</script>"
    bad = [{"time": 1.0, "member": evil, "step": 1, "round": 1, "values": {"loss": 1.0}}]
    page = render(
        summary={"job": evil, "sample": evil}, points=bad,
        events=[{"time": 0, "kind": evil, "text": evil, "member": evil}], job_text=evil,
    )  # fmt: skip
    assert "alert(1)</script>" not in page.replace(plotly_js(), "")


def test_time_between_points_is_split_by_kind() -> None:
    found = stretches(points(), "w0")
    assert [s["start"] for s in found] == [0.0, 2.0, 4.0]
    assert all(abs(s["compute_s"] - 1.5) < 1e-9 for s in found)


def test_rounds_are_drawn_as_bars_that_end_with_their_verdicts(tmp_path: Path) -> None:
    row = {"member": "w1", "node": "lap2", "compute_s": 8.0, "wait_s": 1.0, "send_s": 2.0,
           "vote_s": None, "apply_s": 0.5}  # fmt: skip
    rounds = [
        {"round": 0, "time": 111.0, "timeline": [row]},
        {"round": 1, "time": 131.0, "timeline": [row | {"compute_s": None}]},
        {"round": 2, "time": 140.0, "timeline": []},
    ]
    ((title, about, traces, _),) = timeline_charts(rounds)
    assert (title, about) == ("Timeline of rounds", "What each machine did in the last 2 rounds.")
    computing, waiting, sending, agreeing = traces
    assert (computing["x"], computing["base"]) == ([8.0, 0.0], [0.0, 28.0])
    assert (waiting["base"], sending["base"]) == ([8.0, 28.0], [9.0, 29.0])
    assert agreeing["y"] == ["w1 lap2"] * 2
    worth = {"text": "2 machines", "nodes": [{"text": "remove lap2 <now>"}], "next": {"text": "a"}}
    (tmp_path / "rounds.json").write_text(json.dumps({"rounds": rounds, "worth": worth}))
    page = write_report(tmp_path).read_text("utf-8").replace(plotly_js(), "")
    assert "remove lap2 &lt;now&gt;" in page
    assert "Timeline of rounds" in page
    (tmp_path / "rounds.json").write_text("{ cut")
    assert "Timeline of rounds" not in write_report(tmp_path).read_text("utf-8")
    assert timeline_charts(()) == []


def test_the_report_of_paths_has_their_curves_and_shards() -> None:
    row = {
        "path": 1, "modules": [0, 1], "state": "done", "member": "w0", "node": "attic<1>",
        "step": 30, "tokens": 4096, "loss": 1.25, "held_out": 1.5, "best": 1.4375, "best_step": 20,
        "stopped_early": True, "documents": 12, "shard_tokens": 9000,
    }  # fmt: skip
    paths = {"paths": [row], "levels": [[{"module": 0, "paths": [0, 1]}]], "empty": [3]}
    values = [{"path": 1.0, "loss": 2.0}, {"path": 0.0, "loss": 9.0},
              {"path": 1.0, "held_out_loss_sum": 6.0, "held_out_tokens": 4.0}]  # fmt: skip
    points = [
        {"time": 1.0, "member": f"w{n}", "step": n, "round": 0, "values": one}
        for n, one in enumerate(values)
    ]
    training, held_out = path_charts(paths, points)
    assert [(trace["x"], trace["y"]) for trace in training[2]] == [([0], [2.0])]
    assert [(trace["x"], trace["y"]) for trace in held_out[2]] == [([2], [1.5])]
    page = render(summary={"paths": paths}, points=points, events=[], job_text="")
    page = page.replace(plotly_js(), "")
    for words in ("w0 on attic&lt;1&gt;", "1.4375", "Empty shards: 3", "9,000", "Loss of paths"):
        assert words in page
