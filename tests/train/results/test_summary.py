from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from atoll.config import read_spec
from atoll.errors import StorageFull
from atoll.train.results.summary import (
    Rounds,
    ddp_bytes,
    held_out_losses,
    read_lines,
    summarise,
    write_summary,
)
from tests.patience import PATIENCE_S

SPEC = read_spec({"job": {"nodes": 2, "seed": 5}})
KEYS = {
    "job", "strategy", "nodes", "rounds_committed", "rounds_aborted", "steps", "tokens", "wall_s",
    "compute_s", "utilisation", "loss_first", "loss_final", "bytes_sent_per_node",
    "bytes_sent_ddp_fp32", "reduction", "tokens_per_s", "best_single_node_tokens_per_s",
    "replicas_identical", "same_data", "seed", "versions",
}  # fmt: skip


def result(member: str, **changes: Any) -> dict[str, Any]:
    base = {
        "member": member, "steps": 100, "tokens": 1_000, "rounds": 5, "wall_s": 10.0,
        "compute_s": 9.0, "sent_bytes": 400.0, "control_sent_bytes": 100, "parameters": 50,
        "first_loss_sum": 20.0, "first_tokens": 10, "digests": "aa", "digest": "bb",
        "versions": {"atoll": "1"},
    }  # fmt: skip
    return base | changes


def point(member: str, step: int, round_: int = 0, **values: float) -> dict[str, Any]:
    return {"time": float(step), "member": member, "step": step, "round": round_, "values": values}


def make(
    results: dict[str, Any], points: list[dict[str, Any]] | None = None, **more: Any
) -> dict[str, Any]:
    return summarise(
        job="j", spec=SPEC, results=results, points=points or [], rounds=Rounds(5, 1), **more,
    )  # fmt: skip


def test_the_figures_follow_their_definitions() -> None:
    found = make(
        {
            "w0": result("w0", loss_final=1.5, sample="def x"),
            "w1": result("w1", wall_s=12.0, compute_s=11.0, first_loss_sum=40.0),
        }
    )
    assert found.keys() >= KEYS
    assert found["tokens"] == 2_000
    assert found["wall_s"] == 12.0
    assert found["compute_s"] == 10.0
    assert found["utilisation"] == pytest.approx(10 / 12)
    assert found["loss_first"] == pytest.approx(3.0)
    assert found["loss_final"] == 1.5
    assert found["bytes_sent_per_node"] == 400
    assert found["bytes_sent_ddp_fp32"] == 2 * 1 / 2 * 4 * 50 * 100
    assert found["reduction"] == pytest.approx(50.0)
    assert found["best_single_node_tokens_per_s"] == 100.0
    assert found["replicas_identical"] is True
    assert found["strategy"] == {"inner": "local", "outer": "diloco", "codec": "feedback(int8)"}
    json.dumps(found)


def test_replicas_that_differ_are_reported() -> None:
    assert (
        make({"w0": result("w0"), "w1": result("w1", digest="cc")})["replicas_identical"] is False
    )
    resumed = make({"w0": result("w0"), "w1": result("w1", digests="c")})
    assert resumed["replicas_identical"] is True, "a newcomer has another history"


def test_modules_are_compared_among_their_holders() -> None:
    def held(name: str, **modules: str) -> dict[str, Any]:
        rounds = dict.fromkeys(modules, 5)
        return result(name, digest="", modules=modules, module_rounds=rounds)

    w0, w1 = held("w0", **{"0": "aa", "2": "bb"}), held("w1", **{"1": "cc", "2": "bb"})
    found = make({"w0": w0, "w1": w1})
    assert (found["replicas_identical"], found["replicas_note"]) == (True, "")
    w2 = held("w2", **{"1": "cc", "10": "dd"})
    other = make({"w0": w0, "w1": w1 | {"modules": {"1": "cc", "2": "ee"}}, "w2": w2})
    assert other["replicas_identical"] is False
    assert other["replicas_note"] == "module 2 of w1 differs from that of w0"
    early = w1 | {"modules": {"2": "ee"}, "module_rounds": {"2": 4}}
    assert make({"w0": w0, "w1": early})["replicas_identical"] is None
    assert "held by two members" in make({"w0": w0})["replicas_note"]


def test_members_that_read_different_texts_are_reported() -> None:
    same = {name: result(name, data_digest="d") for name in ("w0", "w1")}
    assert make(same)["same_data"] is True
    assert make(same | {"w1": result("w1", data_digest="other")})["same_data"] is False


def test_members_that_ended_elsewhere_are_not_compared() -> None:
    early = result("w1", rounds=3, steps=60, digest="early")
    found = make({"w0": result("w0"), "w1": early})
    assert found["replicas_identical"] is None
    ends = "w0 ended at step 100, round 5, w1 ended at step 60, round 3"
    assert found["replicas_note"] == f"not comparable: {ends}"
    third = make({"w0": result("w0"), "w1": early, "w2": result("w2")})
    assert third["replicas_identical"] is True
    assert third["replicas_note"].startswith("compared: w0, w2; not comparable: w0 and w2 ended")
    ahead = make({"w0": result("w0", steps=120), "w1": result("w1", steps=90, digest="cc")})
    assert ahead["replicas_identical"] is None
    assert "w1 ended at step 90" in ahead["replicas_note"]
    lost = make({"w0": result("w0")})
    assert lost["replicas_identical"] is None
    assert lost["replicas_note"] == "not comparable: only w0 reported its parameters"


def test_a_lost_member_counts_with_its_last_measurements() -> None:
    points = [point("w1", 10, tokens=100, wall_s=1.0), point("w1", 20, tokens=200, wall_s=2.0)]
    found = make({"w0": result("w0")}, points)
    assert found["tokens"] == 1_200
    assert [m["finished"] for m in found["members"]] == [True, False]


def test_what_killed_processes_did_counts() -> None:
    points = [
        point("w1", 0, process_began=1.0, tokens=0, wall_s=0.0),
        point("w1", 10, tokens=300, wall_s=4.0, compute_s=3.0, sent_bytes=80.0),
        point("w1", 10, process_began=1.0, tokens=0, wall_s=0.0),  # killed, and another one begins
        point("w1", 15, tokens=100, wall_s=1.0),
        point("w1", 12, process_began=1.0, tokens=60, wall_s=0.5),  # from a checkpoint
    ]
    found = make({"w0": result("w0"), "w1": result("w1")}, points)
    assert found["tokens"] == 1_000 + 300 + 40 + 1_000
    assert found["wall_s"] == 4.0 + 0.5 + 10.0
    assert found["tokens_per_s"] == pytest.approx(2_340 / 14.5)
    row = found["members"][1]
    assert (row["compute_s"], row["sent_bytes"]) == (12.0, 80.0 + 400.0)
    assert make({"w0": result("w0")}, points[:2])["tokens"] == 1_300


def test_traffic_is_what_the_page_shows() -> None:
    shown = [
        {"member": name, "node": f"lap{sent}", "sent_bytes": sent, "received_bytes": 7}
        for name, sent in (("w0", 300), ("w1", 500), ("w2", 1))
    ]
    found = make({"w0": result("w0"), "w1": result("w1")}, shown=shown)
    rows = found["members"]
    assert [(row["node"], row["sent_bytes"]) for row in rows] == [("lap300", 300), ("lap500", 500)]
    assert found["bytes_sent_per_node"] * len(rows) == sum(row["sent_bytes"] for row in rows)
    assert [row["control_sent_bytes"] for row in rows] == [100, 100]


def test_shares_of_an_evaluation_add_up() -> None:
    points = [
        point("w0", 0, 1, held_out_loss_sum=10.0, held_out_tokens=5.0),
        point("w1", 0, 1, held_out_loss_sum=20.0, held_out_tokens=5.0),
        point("w0", 50, 3, held_out_loss_sum=5.0, held_out_tokens=5.0),
        point("w0", 100, 6, held_out_loss=0.5),
    ]
    assert held_out_losses(points) == [(0, 1, 3.0), (50, 3, 1.0), (100, 6, 0.5)]
    found = make({"w0": {"member": "w0"}}, points[:3])
    assert (found["loss_first"], found["loss_final"]) == (3.0, 1.0)


def test_a_run_without_any_result_still_has_a_summary() -> None:
    found = make({})
    assert found.keys() >= KEYS
    assert found["loss_final"] is None


def test_one_node_has_nothing_to_compare_with_data_parallel() -> None:
    assert ddp_bytes(parameters=100, members=1, steps=10) == 0
    assert ddp_bytes(parameters=100, members=4, steps=10) == 6_000


def test_a_cut_last_line_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a": ', encoding="utf-8")
    assert read_lines(path) == [{"a": 1}, {"a": 2}]
    assert read_lines(tmp_path / "none.jsonl") == []


def test_a_full_disk_leaves_the_old_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_summary(tmp_path, {"a": 1})

    def full(*args: object, **named: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(StorageFull, match=r"summary\.json"):
        write_summary(tmp_path, {"a": 2})
    assert json.loads((tmp_path / "summary.json").read_bytes()) == {"a": 1}


def test_summary_and_report_load_no_torch() -> None:
    code = (
        "import sys, atoll.train.results.summary, atoll.train.report.report;"
        "sys.exit('torch' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], check=False, timeout=PATIENCE_S).returncode
        == 0
    )


def test_no_member_of_a_swarm_is_the_best_node_alone() -> None:
    ends = [point("w1", 9, 9, held_out_loss=1.5, held_out_accuracy=0.75)]
    found = make({"w0": result("w0", stage=0, tokens=0), "w1": result("w1", stage=1)}, ends)
    assert found["best_single_node_tokens_per_s"] is None
    assert found["tokens_per_s"] == 100.0
    assert (found["loss_final"], found["accuracy"]) == (1.5, 0.75)
    whole = make({"w0": result("w0", stage=-1), "w1": result("w1", stage=0, tokens=9_000)})
    assert whole["best_single_node_tokens_per_s"] == 100.0
