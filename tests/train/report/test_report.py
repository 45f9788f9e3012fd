from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from atoll.ids import machine_names
from atoll.train.report.machines import by_machine, machines_of
from atoll.train.report.paths import path_charts
from atoll.train.report.report import (
    STRETCHES,
    bytes_chart,
    loss_chart,
    render,
    stretches,
    timeline_charts,
    write_report,
)
from atoll.train.report.svg import draw
from atoll.train.report.verdict import verdict


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
    page = write_report(tmp_path).read_text("utf-8")
    assert not re.search(r"(src|href)\s*=", page)
    for words in ("demo", "1.250", "219×", "w1 was lost", "def hello():", "data parallel, fp32"):
        assert words in page


def test_losses_are_labelled_as_the_job_measures_them() -> None:
    summary = {"steps": 9, "loss_first": 0.5, "loss_final": 0.4, "loss_unit": "per answer"}
    page = render(summary=summary, points=points(), events=[], job_text="")
    assert "nats" not in page
    assert "fell from 0.500 to 0.400 per answer" in verdict(summary)
    assert loss_chart(points(), unit="nats per pair")[3]["y"] == "nats per pair"


def test_a_run_that_left_nothing_still_gets_a_report(tmp_path: Path) -> None:
    assert "<h1>Atoll run</h1>" in write_report(tmp_path).read_text("utf-8")


def test_what_members_wrote_cannot_become_markup() -> None:
    evil = "</script><script>alert(1)</script>"
    bad = [{"time": 1.0, "member": evil, "step": 1, "round": 1, "values": {"loss": 1.0}}]
    page = render(
        summary={"job": evil, "sample": evil}, points=bad,
        events=[{"time": 0, "kind": evil, "text": evil, "member": evil}], job_text=evil,
    )  # fmt: skip
    assert "<script" not in page


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
    assert agreeing["y"] == ["w1"] * 2
    worth = {"text": "2 machines", "nodes": [{"text": "remove lap2 <now>"}], "next": {"text": "a"}}
    (tmp_path / "rounds.json").write_text(json.dumps({"rounds": rounds, "worth": worth}))
    page = write_report(tmp_path).read_text("utf-8")
    assert "remove lap2 &lt;now&gt;" in page
    assert "Timeline of rounds" in page
    (tmp_path / "rounds.json").write_text("{ cut")
    assert "Timeline of rounds" not in write_report(tmp_path).read_text("utf-8")
    assert timeline_charts(()) == []


def test_the_report_of_paths_has_their_curves_and_shards() -> None:
    row = {
        "path": 1, "modules": [0, 1], "state": "done", "member": "w0", "name": "attic<1>",
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
    for words in ("attic&lt;1&gt;", "1.4375", "Empty shards: 3", "9,000", "Loss of paths"):
        assert words in page


def many(members: int, steps: int) -> list[dict[str, Any]]:
    return [
        {
            "time": float(step), "member": f"w{n}", "step": step, "round": step // 25,
            "values": {
                "loss": 3.0 + n / 7 - step / 4000, "tokens_per_s": 1234.5678, "wall_s": step / 3,
                "compute_s": step / 4, "wait_s": step / 50, "send_s": step / 99,
                "sent_bytes": 1e6 * step, "held_out_loss_sum": 3e5 / (step + 1),
                "held_out_tokens": 1e5,
            },
        }
        for step in range(1, steps)
        for n in range(members)
    ]  # fmt: skip


def test_report_of_a_long_run_of_many_members_stays_small() -> None:
    row = {"compute_s": 8.0, "wait_s": 1.0, "send_s": 2.0, "vote_s": 0.1, "node": "lap2"}
    rounds = [
        {"round": k, "time": 11.0 * k, "timeline": [{**row, "member": f"w{n}"} for n in range(64)]}
        for k in range(60)
    ]
    summary = {"nodes": 64, "parameters": 10**6, "members": [{"member": "w0"}] * 64}
    events = [{"time": 1.0 * k, "member": "w1", "kind": "x", "text": "y" * 60} for k in range(900)]
    page = render(
        summary=summary, points=many(64, 400), events=events, job_text="", rounds={"rounds": rounds}
    )
    assert len(page.encode()) < 400_000
    assert "<script" not in page
    assert "prefers-color-scheme:dark" in page


def test_steps_do_not_go_back_after_a_resume() -> None:
    went = [1, 2, 3, 4, 5, 3, 4, 5, 6]
    again = [
        {"time": float(k), "member": "w0", "step": step, "round": step, "values": {"loss": k}}
        for k, step in enumerate(went)
    ]
    began = {"time": 5.0, "member": "w0", "step": 0, "round": 0, "values": {"process_began": 1.0}}
    (trace, _) = loss_chart([*again[:5], began, *again[5:]], unit="nats per token")[2]
    assert trace["x"] == [1, 2, 3, 3, 4, 5, 6]
    assert trace["y"] == [0, 1, 2, 5, 6, 7, 8]


def test_long_time_is_divided_into_few_intervals() -> None:
    found = stretches(many(1, 1000), "w0")
    assert len(found) <= STRETCHES
    assert abs(sum(one["compute_s"] for one in found) - 999 / 4) < 1e-6


def test_chart_has_human_ticks_and_every_line() -> None:
    lines = [
        {"x": [0, 90, 600], "y": [1e3, 2e6, 4e8], "name": f"w<{n}>", "mode": "lines"}
        for n in range(3)
    ]
    axes = {"x": "time", "y": "sent", "unit_x": "duration", "unit_y": "bytes", "log_y": True}
    drawn = draw("Traffic", lines, axes)
    assert drawn.count("class='line'") == 3
    for words in (">5:00<", ">10 MB<", "w&lt;2&gt;", "aria-label='Traffic: sent'"):
        assert words in drawn
    assert "nothing was measured" in draw("Traffic", [], axes)
    assert "nothing was measured" in draw("Traffic", [{"x": [], "y": []}], axes)
    flat = draw("Loss", [{"x": [1, 2], "y": [2.0, float("nan")]}], {"x": "step", "y": "nats"})
    assert "class='dots'" in flat


def test_report_opens_with_a_verdict() -> None:
    summary: dict[str, Any] = {
        "nodes": 4, "steps": 2000, "wall_s": 80.0, "loss_first": 5.6, "loss_final": 1.3421,
        "bytes_sent_per_node": 18_300_000, "reduction": 221.4, "state": "done",
        "loss_unit": "nats per token",
    }  # fmt: skip
    assert verdict(summary) == (
        "4 machines took 2,000 steps in 1:20; the held-out loss fell from 5.600 to 1.342 nats per "
        "token. Each sent 18.3 MB, 221 times less than data parallel training."
    )
    assert "loss stayed at 5.600" in verdict({**summary, "loss_final": 5.6})
    failed = verdict({**summary, "state": "failed", "reason": "w1: out of memory"})
    assert failed.startswith("The run failed: w1: out of memory. 4 machines took")
    assert verdict({"nodes": 1, "state": "running"}).startswith("The run had not ended yet. One")
    assert "which they should not" in verdict({**summary, "replicas_identical": False})
    page = render(summary=summary, points=(), events=(), job_text="")
    assert page.index("class='verdict'") < page.index("class='tiles'")


def test_charts_name_machines_as_people_do() -> None:
    rows = [{"member": "w0", "node": "attic"}, {"member": "w1", "node": "lap2"},
            {"member": "w2", "node": "lap2"}]  # fmt: skip
    nodes = machines_of({"members": rows})
    names = machine_names(nodes)
    bars: dict[str, Any] = {"name": "computing", "x": [1.0], "y": ["w0"]}
    (chart,) = by_machine([("Time", "", [bars, {"name": "w1", "x": [0], "y": [2.5]}], {})], names)
    assert [(trace["name"], trace["y"]) for trace in chart[2]] == [
        ("computing", ["attic"]), ("lap2 (w1)", [2.5]),
    ]  # fmt: skip
    events = [{"time": 1.0, "member": "w0", "kind": "stage-moved", "text": "w0 moves; w1 stays"}]
    page = render(summary={"members": rows}, points=(), events=events, job_text="")
    for words in ("<td>attic</td>", "<td>lap2 (w2)</td>", "<td>attic moves; lap2 (w1) stays</td>"):
        assert words in page
    assert "<td>w0" not in page


def test_traffic_of_a_restarted_worker_does_not_fall() -> None:
    sent = [0.0, 80.0, 200.0, 0.0, 50.0]
    points = [
        {"time": float(k), "member": "w0", "step": k, "round": k, "values": {"sent_bytes": count}}
        for k, count in enumerate(sent)
    ]
    (trace, *_) = bytes_chart(points, {})[2]
    assert trace["y"] == [0.0, 80.0, 200.0, 200.0, 250.0]
