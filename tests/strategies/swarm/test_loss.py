"""Training over encoded activations ends where training over exact ones does."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.strategies.inner.swarm.runner import MicrobatchKey
from atoll.strategies.inner.swarm.stage import StageCut
from tests.strategies.swarm.kit import LENGTH, VOCAB, means, runners, through

STEPS, ROWS, LAST = 120, 8, 40


def text_of(step: int) -> tuple[Tensor, Tensor]:
    """Return rows in which three of four tokens follow from the one before."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=generator)
    sure = torch.rand(ROWS, LENGTH, generator=generator) < 0.75
    for place in range(LENGTH):
        follows = (5 * ids[:, place] + 3) % VOCAB
        ids[:, place + 1] = torch.where(sure[:, place], follows, ids[:, place + 1])
    return ids[:, :-1], ids[:, 1:]


def losses(codec: str) -> list[float]:
    path = runners("gpt", cut=StageCut(stages=3))
    optimizers = [torch.optim.AdamW(r.stage.parameters().values(), lr=0.01) for r in path]
    found = []
    for step in range(STEPS):
        key = MicrobatchKey(step, 0)
        found.append(through(path, key, text_of(step), codec=codec))
        for runner in path:
            runner.fold(key)
        means(path)
        for runner, optimizer in zip(path, optimizers, strict=True):
            optimizer.step()
            runner.begin(step + 1)
    return found


def test_int8_activations_cost_less_than_a_hundredth_of_the_loss() -> None:
    exact, coded = losses("fp32"), losses("int8")
    end, found = sum(exact[-LAST:]) / LAST, sum(coded[-LAST:]) / LAST
    assert end < 0.7 * exact[0]  # it learns
    assert exact != coded
    assert abs(found - end) < 0.01 * end, (end, found)
