"""The strategies on a language model against the independent single-process references."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from atoll.config import TrainTable
from atoll.data import BatchStream, HeldOut, Shards
from atoll.methods.every_step import EveryStep
from atoll.methods.periodic import Average, DiLoCo
from atoll.models import GPT, GPTConfig
from atoll.train.optim.optimizers import learning_rate
from bench.diloco import MEMBERS, Setting, deviations, reference, train
from tests.reference.algorithms import Inner as ReferenceInner
from tests.reference.algorithms import flat, local_sgd


@pytest.fixture(scope="module")
def setting() -> Setting:
    torch.manual_seed(1)
    model = GPT(GPTConfig(vocab_size=32, layers=1, width=16, heads=2, context=16))
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 32, (20_000,), generator=generator).cumsum(0) % 32
    return Setting(
        table=TrainTable(steps=30, batch=4, lr=8e-3, warmup=5, final_lr=0.02),
        outer=DiLoCo(every=5, shared_steps=6, outer_lr=0.8, outer_momentum=0.75),
        compared_steps=30,
        held_out_tokens=None,
        held_out=HeldOut(tokens[:1_000], 1.0),
        shards=Shards(tokens, slots=MEMBERS, context=16, seed=3),
        model=model,
    )


@pytest.mark.parametrize(
    ("name", "codec", "tolerance"),
    [("ddp", "fp32", 1e-6), ("diloco_fp32", "fp32", 1e-5), ("diloco_int8", "feedback(int8)", 1e-3)],
)
def test_trajectories_equal_the_reference_to_reassociation(
    setting: Setting, name: str, codec: str, tolerance: float
) -> None:
    options: Any = EveryStep() if name == "ddp" else setting.outer
    found = train(setting, options, members=MEMBERS, codec=codec)
    distances = deviations(setting, name, found, reference(setting, name))
    assert len(distances) >= 6
    assert max(distances.values()) < tolerance
    assert found.identical


def test_local_sgd_equals_the_reference_to_reassociation(setting: Setting) -> None:
    found = train(setting, Average(every=5), members=MEMBERS, codec="fp32")
    streams = [BatchStream(setting.shards, slot=slot, batch=4) for slot in range(MEMBERS)]
    inner = ReferenceInner(lr=learning_rate(setting.table), clip=setting.table.clip)
    expected = local_sgd(setting.model, streams, steps=30, every=5, inner=inner)
    for step, vector in zip(range(5, 31, 5), expected.rounds, strict=True):
        assert (found.kept[step] - vector).norm() / vector.norm() < 1e-5
    assert torch.equal(flat(found.model), found.kept[30])
