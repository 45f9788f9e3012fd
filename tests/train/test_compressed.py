"""Compressed methods in the built-in trainer: stopped, resumed, and under a gradient scaler."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import atoll
from atoll.checkpoint import DirectoryStore
from atoll.config import read_spec
from atoll.group.in_process.groups import MemoryGroups
from atoll.wire.messages import Point
from tests.train.test_scaler import BAD_STEP, together
from tests.train.test_trainer import _one_at_a_time, corpus, make_spec, train_members, weights

__all__ = ["_one_at_a_time", "corpus"]

TABLES = [
    {"preset": "sparta", "probability": 0.1},
    {"preset": "signsgd", "feedback": True},
    {"preset": "powersgd", "rank": 2},
    {"preset": "demo"},
    {"preset": "one-bit-adam", "warmup_steps": 3},
    {"preset": "cocktail-sgd", "probability": 0.5},
]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: "-".join(map(str, table.values())))
@pytest.mark.every(4)
def test_stopped_and_resumed_equals_uninterrupted_bit_for_bit(
    corpus: str, tmp_path: Path, table: dict[str, Any]
) -> None:
    spec = replace(make_spec(corpus), strategy=read_spec({"strategy": table}).strategy)
    store, groups = DirectoryStore(tmp_path / "halves", job="j"), MemoryGroups(2)

    def stop_in_mid_run(point: Point) -> None:
        if point.round >= 5:
            groups.stop()

    halves = tmp_path / "halves"
    cut = train_members(spec, halves, groups=groups, store=store, report=stop_in_mid_run)
    assert cut[0]["stopped"]
    assert 3 < cut[0]["steps"] < 12
    resumed = MemoryGroups(2, start_round=store.latest())
    rest = train_members(spec, halves, groups=resumed, store=store, resume_round=store.latest())
    whole = train_members(spec, tmp_path / "whole")
    assert rest[0]["digest"] == rest[1]["digest"] == whole[0]["digest"] == whole[1]["digest"]
    for name, tensor in weights(tmp_path / "whole").items():
        assert torch.equal(tensor, weights(halves)[name])


@pytest.mark.parametrize(
    "options",
    [
        atoll.SignMajority(momentum=0.5),
        atoll.SignMajority(feedback=True),
        atoll.PowerSGD(rank=1),
        atoll.DeMo(decay=0.9, topk=2),
        atoll.OneBitAdam(warmup_steps=2),
    ],
    ids=lambda options: type(options).__name__,
)
@pytest.mark.every(3)
def test_a_step_in_which_one_member_overflowed_is_skipped_by_all(
    tmp_path: Path, options: Any
) -> None:
    adam = {"optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01)}
    first, second = together(tmp_path, options, scaled=True, bad=("w1",), **adam)
    assert torch.equal(first.vector(), second.vector())
    assert torch.isfinite(first.vector()).all()
    assert first.skipped == second.skipped
    assert [step for step, skipped in enumerate(first.skipped) if skipped] == [BAD_STEP]


def test_overflow_skips_one_members_cocktail_step(
    tmp_path: Path,
) -> None:
    options = atoll.Cocktail(probability=0.5)
    first, second = together(tmp_path, options, scaled=True, bad=("w1",))
    assert not any(first.skipped)
    assert [step for step, skipped in enumerate(second.skipped) if skipped] == [BAD_STEP]
    assert torch.equal(first.vector(), second.vector())
    assert torch.isfinite(first.vector()).all()
