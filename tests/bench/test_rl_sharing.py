"""Figures of the benchmarks of shared completions and of patches over slow lines."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from atoll.config import parse_spec
from atoll.config.rl_roles import member_roles
from atoll.queues import InMemoryChannel
from atoll.rl.text.rollouts import RolloutWorker
from atoll.rl.text.start import start_model
from bench.rl import patches, sharing
from bench.rl.patches_member import train
from tests.patience import PATIENCE_S
from tests.rl.text.test_run import member


def run(after: float, area: float) -> dict[str, Any]:
    return {"before": 0.1, "after": after, "area": area, "written": 64, "text_bytes": 0,
            "cpu_s": 1.0}  # fmt: skip


def test_variants_are_compared_seed_by_seed() -> None:
    found = {
        sharing.ALONE: [run(0.2, 0.1), run(0.6, 0.5), run(0.4, 0.3)],
        "4/0": [run(0.1, 0.0), run(0.5, 0.4), run(0.3, 0.2)],
        "4/4": [run(0.3, 0.1), run(0.7, 0.5), run(0.5, 0.3)],
    }
    alone, fewer, shared = (sharing.row_of(name, found) for name in found)
    assert alone["after_difference"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert shared["after_difference"] == pytest.approx({"mean": 0.1, "low": 0.1, "high": 0.1})
    assert shared["after_gain"] == pytest.approx({"mean": 0.2, "low": 0.2, "high": 0.2})
    assert "after_gain" not in alone | fewer
    assert shared["after"]["low"] < 0.5 < shared["after"]["high"]


def test_a_run_that_shares_writes_half_and_learns_from_as_much() -> None:
    spec = sharing.spec_of(1, variant="4/4", updates=1)
    small = dataclasses.replace(spec.rl, group=2, steps=2 * 8)
    spec = dataclasses.replace(spec, rl=small)
    found = sharing.measure(spec, start_model(spec))
    assert found["written"] == 2 * 4
    assert found["text_bytes"] > 0
    assert len(found["curve"]) == 1


def test_rewards_over_a_line_are_summed_up() -> None:
    lines = [{"reward": n / 16, "bytes": 100 + n, "publish_s": 1.0, "age": 2.0, "received": 50 * n,
              "at_s": float(n)} for n in range(16)]  # fmt: skip
    one = {"before": 0.1, "after": 0.5, "dropped": {"stale": 2}, "weights": 1000, "texts": [],
           "lines": lines}  # fmt: skip
    row = patches.row_of([one, one])
    assert (row["before"], row["after"], row["dropped"]) == (0.1, 0.5, 4)
    assert row["curve"] == [round((2 * n + 0.5) / 16, 3) for n in range(patches.PLACES)]
    assert row["of_whole"] == pytest.approx(2000 / 107.5, abs=0.1)
    assert row["after_error"] == pytest.approx((0.25 / 512) ** 0.5, abs=1e-4)


def test_a_trainer_of_the_line_learns_from_its_worker(tmp_path: Path) -> None:
    text = patches._job(small=True, model="package:none", updates=2, lr=5e-4)
    spec, channel = parse_spec(text.format(seed=3)), InMemoryChannel()
    trainer, writer = member_roles(spec.rl)
    runs = [member(slot, spec, channel, tmp_path) for slot in (0, 1)]
    worker = RolloutWorker(spec, runs[1], writer, start_model(spec))
    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()
    found = train(runs[0], spec, trainer, start_model(spec), tmp_path / "lines.jsonl")
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    lines = (tmp_path / "lines.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2
    assert all(json.loads(line)["bytes"] > 0 for line in lines)
    assert 0.0 <= found["before"] <= 1.0
    assert patches.row_of([found | {"lines": [json.loads(line) for line in lines]}])["bytes"] > 0
