"""Members that carry models of their own: checkpoints keep each, a newcomer copies one donor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import atoll
from atoll.checkpoint import DirectoryStore
from atoll.checkpoint.format.part import SHARED, member_part
from atoll.checkpoint.format.weights import MODEL_PREFIX
from atoll.config import read_spec
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.strategies.outer.noloco import OWN_SLOW
from atoll.train.state.committed import CommittedState, adopt
from atoll.wire.messages import Point
from tests.contracts.strategy_suite import Run, small_model, start_run
from tests.train.state.test_committed import newcomer, through_bytes
from tests.train.test_trainer import _one_at_a_time, corpus, make_spec, train_members, weights

__all__ = ["_one_at_a_time", "corpus"]

TABLES = [
    {"preset": "d-psgd", "codec": "feedback(int8)"},
    {"preset": "push-sum", "every": 2},
    {"preset": "noloco", "every": 3},
    {"preset": "ad-psgd", "delay": 1},
]


def stopped(corpus: str, folder: Path, table: dict[str, Any]) -> tuple[Any, DirectoryStore]:
    """Return the job and the checkpoint of two members that were stopped in the middle."""
    spec = replace(make_spec(corpus), strategy=read_spec({"strategy": table}).strategy)
    store, groups = DirectoryStore(folder, job="j"), MemoryGroups(2)

    def stop_in_mid_run(point: Point) -> None:
        if point.round >= 2:
            groups.stop()

    cut = train_members(spec, folder, groups=groups, store=store, report=stop_in_mid_run)
    assert cut[0]["stopped"]
    assert 0 < cut[0]["steps"] < 12
    return spec, store


@pytest.mark.parametrize("table", TABLES, ids=lambda table: str(table["preset"]))
def test_stopped_and_resumed_equals_uninterrupted_bit_for_bit(
    corpus: str, tmp_path: Path, table: dict[str, Any]
) -> None:
    spec, store = stopped(corpus, tmp_path / "halves", table)
    parts = store.get(store.latest(), names={SHARED, member_part("w0"), member_part("w1")})
    own = [
        {k: v for k, v in parts[member_part(member)].tensors.items() if k.startswith(MODEL_PREFIX)}
        for member in ("w0", "w1")
    ]
    apart = any(not torch.equal(own[0][name], own[1][name]) for name in own[0])
    assert apart or table["preset"] == "noloco"  # two members without a third stay together
    resumed = MemoryGroups(2, start_round=store.latest())
    rest = train_members(
        spec, tmp_path / "halves", groups=resumed, store=store, resume_round=store.latest()
    )
    whole = train_members(spec, tmp_path / "whole")
    assert [one["digest"] for one in rest] == [one["digest"] for one in whole]
    assert rest[0]["digest"] == rest[1]["digest"]
    assert rest[0]["digests"] == whole[0]["digests"] == whole[1]["digests"]
    for name, tensor in weights(tmp_path / "whole").items():
        assert torch.equal(tensor, weights(tmp_path / "halves")[name])


OPTIONS = [
    atoll.Gossip(every=3),
    atoll.Gossip(graph="random", push_sum=True),
    atoll.NoLoCo(every=3),
    atoll.Pairwise(delay=1),
]


@pytest.mark.parametrize("options", OPTIONS, ids=repr)
def test_a_newcomer_becomes_a_copy_of_its_one_donor(options: Any, tmp_path: Path) -> None:
    def body(group: Group) -> Run:
        run = start_run(options, group, int(group.me[1:]), model=small_model(normalised=True))
        run.train(7)
        return run

    runs = MemoryGroups(2).together(body)
    states = [CommittedState(run.task, run.outer) for run in runs]
    assert states[0].base == states[1].base
    assert not states[0].identical
    assert not torch.equal(runs[0].vector(), runs[1].vector())
    for run, state in zip(runs, states, strict=True):
        shared, inner = (through_bytes(part, tmp_path) for part in state.parts())
        task, outer, _ = newcomer(options)
        adopt(task, outer, shared=shared, inner=inner)
        assert task.past == run.task.past
        assert (task.step, task.round) == (run.outer.committed(run.task).step, run.task.round)
        assert outer.committed(task).base == state.base
        expected = run.outer.state_dict().get(OWN_SLOW, run.vector())
        assert torch.equal(Run(task, outer, run.stream, run.inner).vector(), expected)
