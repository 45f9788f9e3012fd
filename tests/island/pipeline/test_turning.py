"""A subspace that turns every few steps: on all ranks alike, in checkpoints, and without a loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.config import parse_spec
from atoll.errors import ConfigError
from atoll.strategies.inner.options import check_island
from atoll.strategies.inner.pipeline.subspace import SEED, Subspace
from atoll.strategies.inner.pipeline.turning import BASIS
from atoll.strategies.inner.worker import Worker
from tests.island.leading import Member, by_itself, led, same, table
from tests.island.pool import Ranks

MODEL, TRAIN = "untied", table(steps=20)
CUTS = {1: (), 2: (3,)}
"""Measured ones may differ from run to run, and with them which blocks are confined."""
TWICE = {"pipeline": 2, "replicate": 2}
"""Two replicas of two stages."""


def _use(member: Member) -> dict[str, Any]:
    member.train(4)
    member.task.pull()
    halfway = member.parameters()
    state = member.task.optimizer.state_dict()
    member.train(3, first=5)
    return {"halfway": halfway, "state": state, "end": member.parameters()}


def _of_rank(found: Any, keep: list[Worker]) -> tuple[Any, Tensor, Tensor]:
    """Return what the first rank found, and this rank's basis and table."""
    confined: Any = keep[0]._parts
    confined = confined.confined
    return found, confined.subspace.basis, confined.boundary.table


def _train(
    axes: dict[str, int], size: int, refresh: int, optimizer: str = "adamw"
) -> tuple[Any, Tensor, Tensor]:
    keep: list[Worker] = []
    words = {"activations": f"subspace:{size}", "refresh": refresh, "cuts": CUTS[axes["pipeline"]]}
    train = replace(TRAIN, optimizer=optimizer)
    return _of_rank(led(_use, MODEL, train, axes, keep, **words), keep)


def _resume(
    axes: dict[str, int], saved: dict[str, Any], steps: int, optimizer: str
) -> tuple[Any, Tensor, Tensor]:
    keep: list[Worker] = []

    def use(member: Member) -> dict[str, Tensor]:
        with torch.no_grad():
            for name, parameter in member.task.model.named_parameters():
                parameter.copy_(saved["halfway"][name])
        member.task.optimizer.load_state_dict(saved["state"])
        member.task.push()
        scheduler: Any = member.task.scheduler
        scheduler.load_state_dict({"step": 4})
        member.task.step = 4
        member.train(steps, first=5)
        return member.parameters()

    words = {"activations": "subspace:5", "refresh": 3, "cuts": CUTS[axes["pipeline"]]}
    train = replace(TRAIN, optimizer=optimizer)
    return _of_rank(led(use, MODEL, train, axes, keep, **words), keep)


def test_all_ranks_turn_to_the_same_subspace(ranks: Ranks) -> None:
    found = ranks.run(4, _train, TWICE, 5, 3)
    first, basis, tokens = found[0]
    for _, other, table_ in found[1:]:
        assert torch.equal(other, basis)
        assert torch.equal(table_, tokens)
    drawn = Subspace.drawn(16, 5, seed=SEED).basis
    assert float((basis - drawn).abs().max()) > 1e-3, "it has turned"
    torch.testing.assert_close(basis.T @ basis, torch.eye(5, dtype=basis.dtype))
    turned = Subspace(basis)
    for name in ("blocks.0.merge.weight", "blocks.0.down.weight"):
        weight = first["end"][name]
        assert float(turned.outside(weight.T).norm() / weight.norm()) < 1e-6
    outside = turned.outside(first["end"]["embedding.weight"])
    torch.testing.assert_close(outside, tokens)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_run_that_resumes_has_the_saved_subspace(ranks: Ranks, optimizer: str) -> None:
    axes = {"pipeline": 2}
    whole, basis, _ = ranks.run(2, _train, axes, 5, 3, optimizer)[0]
    (saved,) = [own[BASIS] for own in whole["state"]["state"].values() if BASIS in own]
    for _, again, _ in ranks.run(2, _resume, axes, whole, 1, optimizer):
        assert torch.equal(again, saved), "on all ranks, and it does not turn before its time"
    for end, again, _ in ranks.run(2, _resume, axes, whole, 3, optimizer):
        torch.testing.assert_close(again, basis)
        assert not torch.equal(again, saved)
        if end is not None:
            same(end, whole["end"], 1e-12)


def test_the_whole_space_is_exact_with_turns(ranks: Ranks) -> None:
    found = ranks.run(2, _train, {"pipeline": 2}, 16, 2)[0][0]["end"]
    plain = by_itself(MODEL, TRAIN)
    plain.train(7)
    same(found, plain.parameters(), 1e-12)


JOB = """
[strategy]
preset = "{preset}"
inner = "pipeline"
[island]
ranks = 2
refresh = 500
schedule = "{schedule}"
activations = "{activations}"
"""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activations": "int8"}, "no subspace to turn"),
        ({"schedule": "async"}, "step at different times"),
        ({"preset": "diloco"}, 'cannot combine their weights.*preset = "alone"'),
    ],
)
def test_what_cannot_turn_is_refused(changes: dict[str, str], message: str) -> None:
    usual = {"preset": "alone", "schedule": "1f1b", "activations": "subspace:4"}
    check_island(parse_spec(JOB.format(**usual)))
    with pytest.raises(ConfigError, match=message):
        check_island(parse_spec(JOB.format(**usual | changes)))
