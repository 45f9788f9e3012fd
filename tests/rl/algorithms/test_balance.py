import itertools

import pytest
import torch

from atoll.rl.algorithms.ppo import in_order, minibatches
from tests.rl.lived import lived


def test_order_of_arrival_does_not_matter() -> None:
    some = [
        lived(policy, sequence=sequence, actor=actor)
        for policy, actor, sequence in itertools.product(("b", "a"), ("w2", "w1"), (10, 9))
    ]
    wanted = [(t.policy, t.actor, t.sequence) for t in some]
    for order in itertools.islice(itertools.permutations(range(8)), 0, 40000, 997):
        shuffled = [some[i] for i in order]
        found = [shuffled[i] for i in in_order(shuffled)]
        assert [(t.policy, t.actor, t.sequence) for t in found] == sorted(wanted)


@pytest.mark.parametrize("counts", [[40], [40, 40], [100, 10, 3], [2, 7], [0, 5]])
def test_pass_has_every_row_once_and_equal_group_weights(counts: list[int]) -> None:
    generator = torch.Generator().manual_seed(3)
    seen: list[list[int]] = [[] for _ in counts]
    for part in minibatches(counts, parts=4, generator=generator):
        shares = torch.split(part.weights, [len(rows) for rows in part.rows])
        present = [float(share.sum()) for share in shares if len(share)]
        assert present == pytest.approx([1.0 / len(present)] * len(present))
        for rows, group in zip(part.rows, seen, strict=True):
            group.extend(rows.tolist())
    assert [sorted(group) for group in seen] == [list(range(count)) for count in counts]


def test_passes_differ_and_repeat_with_the_generator() -> None:
    def draw(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return next(iter(minibatches([30], parts=3, generator=generator))).rows[0].tolist()

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
