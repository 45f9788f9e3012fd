"""The references against what they must equal by their definition."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from atoll.data import BatchStream, Shards
from atoll.models import build_model
from tests.reference.algorithms import Inner, Wire, data_parallel, diloco, flat, local_sgd, one_node

INNER = Inner(lr=lambda step: 0.01 / (1 + step))


def model() -> nn.Module:
    torch.manual_seed(0)
    return build_model("gpt", vocab_size=16, layers=1, width=8, heads=2, context=8)


def streams(count: int = 3, batch: int = 2) -> list[BatchStream]:
    tokens = torch.randint(0, 16, (4000,), generator=torch.Generator().manual_seed(1))
    shards = Shards(tokens, slots=count, context=8, seed=1)
    return [BatchStream(shards, slot=slot, batch=batch) for slot in range(count)]


def joined(parts: list[BatchStream]) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        batches = [next(part) for part in parts]
        yield torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def test_data_parallel_is_one_node_with_the_joint_batch() -> None:
    parallel = data_parallel(model(), streams(), steps=6, inner=INNER)
    alone = one_node(model(), joined(streams()), steps=6, inner=INNER)
    assert torch.allclose(parallel.rounds[-1], alone.rounds[-1], atol=1e-5)
    means = [sum(step) / 3 for step in parallel.losses]
    assert means == pytest.approx([step[0] for step in alone.losses], abs=1e-5)


def test_one_member_averaging_is_plain_training() -> None:
    averaged = local_sgd(model(), streams()[:1], steps=6, every=2, inner=INNER)
    alone = one_node(model(), streams()[0], steps=6, inner=INNER)
    assert torch.allclose(averaged.rounds[-1], alone.rounds[-1], atol=1e-6)


def test_outer_step_is_torch_sgd_with_nesterov_bit_for_bit() -> None:
    again = nn.Parameter(flat(model()))
    outer = torch.optim.SGD([again], lr=0.7, momentum=0.9, nesterov=True)
    deltas: list[Tensor] = []

    def keep(round_: int, delta: Tensor) -> Tensor:
        deltas.append(delta)
        return delta

    wire = Wire(down=keep)
    run = diloco(
        model(), streams(), steps=8, every=2, outer_lr=0.7, momentum=0.9, inner=INNER, wire=wire
    )
    for delta, expected in zip(deltas, run.rounds, strict=True):
        again.grad = delta
        outer.step()
        assert torch.equal(again.detach(), expected)


def test_rounds_follow_the_warm_up_the_interval_and_the_end() -> None:
    def count(steps: int) -> int:
        return len(
            diloco(
                model(),
                streams(2),
                steps=steps,
                every=4,
                outer_lr=0.7,
                momentum=0.9,
                inner=INNER,
                warmup_steps=5,
                warmup_every=2,
            ).rounds
        )

    assert [count(5), count(9), count(12)] == [3, 4, 5]  # at 2 4 5, 9, then 12 as the last


def test_identical_members_are_one_member() -> None:
    four = diloco(
        model(),
        [streams()[0] for _ in range(4)],
        steps=4,
        every=2,
        outer_lr=0.7,
        momentum=0.9,
        inner=INNER,
    )
    alone = diloco(
        model(), streams()[:1], steps=4, every=2, outer_lr=0.7, momentum=0.9, inner=INNER
    )
    assert torch.allclose(four.rounds[-1], alone.rounds[-1], atol=1e-6)
