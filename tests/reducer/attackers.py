"""Members that lie about their gradients, and a small training to see what it does."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from atoll.codec.base import Codec
from atoll.errors import AtollError, DeadlineExceeded
from atoll.group.aggregation import Aggregation
from atoll.group.base import Group, Reduced, Work
from atoll.group.in_process.groups import MemoryGroup, MemoryGroups
from atoll.methods.every_step import EveryStep
from tests.contracts.strategy_suite import Batch, Run, small_model, start_run
from tests.patience import PATIENCE_S

MEMBERS, BAD, STEPS, BATCH = 7, 2, 40, 16
HIDDEN = small_model(seed=11)
Attack = Callable[["Attacker"], Tensor]
"""Returns what is sent in place of the last honest gradient."""


def samples(slot: int, step: int, size: int = BATCH) -> Batch:
    """Return what a hidden network says, with noise: the least loss that can be reached is 0.25."""
    generator = torch.Generator().manual_seed(10_000 * slot + step)
    x = torch.randn(size, 5, generator=generator)
    noise = 0.5 * torch.randn(size, 2, generator=generator)
    with torch.no_grad():
        return x, 2.0 * HIDDEN(x) + noise


def stream(slot: int) -> Iterator[Batch]:
    step = 0
    while True:
        yield samples(slot, step)
        step += 1


def gradient(model: nn.Module, batch: Batch) -> Tensor:
    loss = nn.functional.mse_loss(model(batch[0]), batch[1])
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


class Attacker(MemoryGroup):
    """Sends something else than it was given."""

    attack: Attack
    model: nn.Module
    sent: list[Tensor]

    def reduce(
        self, xs: Sequence[Tensor], *, codec: Codec, weight: float, key: str = "x"
    ) -> Work[Reduced]:
        if key == "gradient":
            self.sent.append(xs[0].clone())
            xs = [type(self).attack(self)]
        return super().reduce(xs, codec=codec, weight=weight, key=key)


def flipped(liar: Attacker) -> Tensor:
    return -10.0 * liar.sent[-1]


def nan(liar: Attacker) -> Tensor:
    return liar.sent[-1].index_fill(0, torch.tensor([3]), math.nan)


def huge(liar: Attacker) -> Tensor:
    return torch.full_like(liar.sent[-1], 1e30)


def little(liar: Attacker) -> Tensor:
    """The mean of all honest ones less a deviation: inside their spread, always the same way.

    Baruch et al. 2019, "A Little Is Enough" (https://arxiv.org/abs/1902.06156).
    """
    step = len(liar.sent) - 1
    honest = torch.stack(
        [gradient(liar.model, samples(slot, step)) for slot in range(MEMBERS - BAD)]
    )
    return honest.mean(0) - honest.std(0)


def replayed(liar: Attacker) -> Tensor:
    """The gradient of the first step, for ever."""
    return liar.sent[0]


def train(aggregation: Aggregation, attack: Attack | None, *, codec: str = "fp32") -> float:
    """Return the loss of an honest member on fresh data; infinite if the training broke down."""
    # No grace: who is slow must not be left out, because a rule that drops two needs all honest
    # ones when both liars are gone. No member waits for these, they close their group.
    groups = MemoryGroups(MEMBERS, timeout_s=PATIENCE_S)
    for group in groups:
        group.aggregation = aggregation
        if attack is not None and int(group.me[1:]) >= MEMBERS - BAD:
            group.__class__ = type("Liar", (Attacker,), {"attack": staticmethod(attack)})

    def member(group: Group) -> Run:
        run = start_run(EveryStep(), group, 0, optimizer=rate, clip=0.0, codec=codec)
        run.stream = stream(int(group.me[1:]))
        if isinstance(group, Attacker):
            group.model, group.sent = run.task.model, []
        try:
            run.train(STEPS)
        except AtollError:
            group.close()
            raise
        return run

    first = groups.run(member, timeout_s=PATIENCE_S)[0]
    if isinstance(first, DeadlineExceeded):  # a slow machine is not a training that broke down
        raise first
    if not isinstance(first, Run):
        return math.inf
    x, y = samples(99, 0, 512)
    with torch.no_grad():
        return float(nn.functional.mse_loss(first.task.model(x), y))


def rate(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2)


def main() -> None:
    """Print the loss that honest members reach, by rule and attack, as a table for the docs."""
    attacks: list[Attack | None] = [None, flipped, nan, huge, little, replayed]
    logging.disable(logging.CRITICAL)
    print("| rule | " + " | ".join(a.__name__ if a else "nobody" for a in attacks) + " |")
    print("|---" * (1 + len(attacks)) + "|")
    rules = ["mean", "median", "trimmed:2", "krum:2", "multi-krum:2", "clip:0.5:3"]
    aggregations = [Aggregation(aggregate=rule) for rule in [*rules, "geometric-median"]]
    for aggregation in [*aggregations, Aggregation(admission="norms")]:
        name = (
            aggregation.aggregate if aggregation.admission == "finite" else "mean, admission norms"
        )
        losses = [train(aggregation, attack) for attack in attacks]
        cells = [f"{loss:.3f}" if loss < 1e3 else "broken" for loss in losses]
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
