"""Every outer strategy over an island: the other members cannot tell it from one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from atoll.codec import make_codec
from atoll.config import StrategyTable
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.island.command_broadcaster import CommandBroadcaster
from atoll.strategies.base import Inner, extend_history_hash
from atoll.strategies.inner.local import Local, language_model_loss
from atoll.strategies.inner.worker import Worker
from atoll.strategies.resolve import resolve
from atoll.strategies.vectors.flat import Flat
from atoll.task import Task
from tests.island.leading import MODELS, lead, table, task_of, worker_of
from tests.island.pool import Ranks
from tests.island.reference import batch_for

STEPS = 8
MODEL = "perceptron"
TRAIN = table(steps=STEPS)

ALIKE: dict[str, dict[str, Any]] = {
    "diloco": {"outer": "diloco", "every": 3, "shared_steps": 1},
    "diloco int8": {"outer": "diloco", "codec": "feedback(int8)", "every": 2},
    "average every step": {"outer": "average", "every": 1},
    "slowmo": {"outer": "slowmo", "every": 3},
    "streaming": {"outer": "streaming", "every": 4, "fragments": 2, "delay": 1, "mix": 0.5},
    "streaming at once": {"outer": "streaming", "every": 2, "fragments": 2, "delay": 0},
    "eager": {"outer": "eager", "every": 2, "codec": "feedback(int8)"},
    "gossip": {"outer": "gossip", "codec": "int8"},
    "noloco": {"outer": "noloco", "every": 2},
    "sparta": {"outer": "sparta", "probability": 0.2},
    "cocktail": {"outer": "cocktail", "codec": "topk:0.5|int4"},
}
"""Methods whose result follows from data alone."""

FREE: dict[str, dict[str, Any]] = {
    "async-diloco": {"outer": "asynchronous", "every": 2, "anchor_every": 4},
    "stale server": {"outer": "server", "mode": "stale", "bound": 2, "anchor_every": 4},
    "pairwise": {"outer": "pairwise"},
}
"""Methods in which it matters who comes first."""


def _strategy(words: dict[str, Any]) -> Any:
    rest = dict(words)
    codec = rest.pop("codec", "fp32")
    return resolve(StrategyTable(outer=rest.pop("outer"), codec=codec, options=rest), steps=STEPS)


def _train(task: Task, inner: Inner, group: Group, words: dict[str, Any]) -> Tensor:
    """Train one of two members; return all it ends with."""
    resolved, slot = _strategy(words), int(group.me[1:])
    outer = resolved.build()
    outer.setup(task, group=group, codec=make_codec(resolved.codec))
    extend_history_hash(task, outer.begin(task))
    seed = 100 * slot
    while task.step < STEPS:
        seed += 1
        inner.step(task, batch_for(task.model, seed=seed), outer)
    with task.state_lock.moving():
        while (last := extend_history_hash(task, outer.finish(task))) is not None and last.more:
            pass
    return Flat([*task.parameters(), *task.buffers()], task=task).read()


def _together(
    words: dict[str, Any],
    broadcaster: CommandBroadcaster | None = None,
    worker: Worker | None = None,
) -> Any:
    """Train two members; the first is an island if there is a broadcaster."""
    tasks = [task_of(MODELS[MODEL](), TRAIN) for _ in range(2)]
    inners: list[Inner] = [Local(language_model_loss, clip=TRAIN.clip) for _ in range(2)]
    if broadcaster is not None and worker is not None:
        inners[0] = lead(tasks[0], broadcaster, worker)

    def body(group: Group) -> Tensor:
        slot = int(group.me[1:])
        tasks[slot].member = group.me
        return _train(tasks[slot], inners[slot], group, words)

    return MemoryGroups(2).together(body)


def _all(cases: dict[str, dict[str, Any]], axes: dict[str, int]) -> Any:
    """Return what the two members end with, by case; on the first rank."""
    broadcaster = CommandBroadcaster(rank=dist.get_rank(), ranks=dist.get_world_size())
    worker = worker_of(broadcaster, MODELS[MODEL], TRAIN, axes)
    if not broadcaster.leads:
        broadcaster.serve()
        return None
    try:
        return {name: _together(words, broadcaster, worker) for name, words in cases.items()}
    finally:
        broadcaster.end()


@pytest.fixture(scope="module")
def found(ranks: Ranks) -> dict[str, list[Tensor]]:
    """All cases over two shards, in one go."""
    first: dict[str, list[Tensor]] = ranks.run(2, _all, ALIKE | FREE, {"shard": 2})[0]
    return first


@pytest.mark.parametrize("case", ALIKE)
@pytest.mark.every(4)
def test_over_shards_it_is_as_over_one_process(found: dict[str, list[Tensor]], case: str) -> None:
    expected = _together(ALIKE[case])
    for member, alone in zip(found[case], expected, strict=True):
        torch.testing.assert_close(member, alone, rtol=1e-6, atol=1e-7)
    assert torch.equal(found[case][0], found[case][1]), "both end with one model"


@pytest.mark.parametrize("case", FREE)
@pytest.mark.every(2)
def test_members_of_other_speeds_end_with_one_model(
    found: dict[str, list[Tensor]], case: str
) -> None:
    first, second = found[case]
    assert torch.equal(first, second)
    start = Flat(list(MODELS[MODEL]().parameters())).read()
    assert bool(first.isfinite().all())
    assert float((first - start).abs().max()) > 1e-3
