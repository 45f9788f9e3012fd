"""The strategies on a language model against the independent single-process references."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from atoll.config import TrainTable
from atoll.data import BatchStream, HeldOut, Shards
from atoll.methods.every_step import EveryStep
from atoll.methods.local_moments import MTDAO, DesLoc
from atoll.methods.overlapped import Decoupled
from atoll.methods.parameter_server import Asynchronous, Hierarchical
from atoll.methods.periodic import Average, DiLoCo
from atoll.models import GPT, GPTConfig
from atoll.train.optim.optimizers import learning_rate
from bench.diloco import MEMBERS, Outcome, Setting, deviations, reference, train
from tests.reference.algorithms import Inner as ReferenceInner
from tests.reference.algorithms import Trajectory, flat, local_sgd
from tests.reference.asynchronous import async_diloco
from tests.reference.decoupled import decoupled
from tests.reference.halos import Hierarchy, Step, halos
from tests.reference.local_adam import local_adam
from tests.reference.sparse_loco import sparse_loco


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


def test_sparseloco_equals_the_reference_to_reassociation(setting: Setting) -> None:
    options = DiLoCo(every=5, outer_optimizer="sgd", outer_lr=0.9)
    codec = "feedback:0.95(topk:0.0625:256|mean2)"
    found = train(setting, options, members=MEMBERS, codec=codec)
    streams = [BatchStream(setting.shards, slot=slot, batch=4) for slot in range(MEMBERS)]
    inner = ReferenceInner(lr=learning_rate(setting.table), clip=setting.table.clip)
    expected = sparse_loco(
        setting.model, streams, steps=30, every=5, inner=inner, outer_lr=0.9, decay=0.95,
        keep=16, chunk=256, quantised=True,
    )  # fmt: skip
    for step, vector in zip(range(5, 31, 5), expected.rounds, strict=True):
        assert (found.kept[step] - vector).norm() / vector.norm() < 1e-4


def inputs(setting: Setting) -> tuple[list[BatchStream], ReferenceInner]:
    streams = [BatchStream(setting.shards, slot=slot, batch=4) for slot in range(MEMBERS)]
    return streams, ReferenceInner(lr=learning_rate(setting.table), clip=setting.table.clip)


def test_des_loc_equals_the_reference_to_reassociation(setting: Setting) -> None:
    options = DesLoc(every=5, momentum_rounds=2, variance_rounds=3, moments="fp32")
    found = train(setting, options, members=MEMBERS, codec="fp32")
    streams, inner = inputs(setting)
    expected = local_adam(
        setting.model, streams, steps=30, every=5, mean_every=10, variance_every=15, inner=inner
    )
    compare(found, range(5, 31, 5), expected)


def test_mt_dao_equals_the_reference_to_reassociation(setting: Setting) -> None:
    options = MTDAO(
        every=5, momentum_rounds=2, variance_rounds=3, slow_rounds=1, slow_beta=0.98,
        slow_weight=0.3, moments="fp32",
    )  # fmt: skip
    found = train(setting, options, members=MEMBERS, codec="fp32")
    streams, inner = inputs(setting)
    expected = local_adam(
        setting.model, streams, steps=30, every=5, mean_every=10, variance_every=15,
        slow_every=5, beta=0.98, omega=0.3, inner=inner,
    )  # fmt: skip
    compare(found, range(5, 31, 5), expected)


def test_decoupled_equals_the_reference_to_reassociation(setting: Setting) -> None:
    options = Decoupled(
        every=5, fragments=1, delay=1, grace=0, outer_lr=0.4, outer_momentum=0.9
    )  # fmt: skip
    found = train(setting, options, members=MEMBERS, codec="fp32")
    streams, inner = inputs(setting)
    expected = decoupled(
        setting.model, streams, steps=30, every=5, delay=1, inner=inner, outer_lr=0.4, momentum=0.9
    )
    compare(found, [*range(6, 30, 5), 30], expected)


@pytest.mark.parametrize("look_ahead", [0.0, 0.75])
def test_async_diloco_equals_the_reference_to_reassociation(
    setting: Setting, look_ahead: float
) -> None:
    options = Asynchronous(
        every=5, anchor_every=15, outer_momentum=0.8, dynamic=False, look_ahead=look_ahead
    )
    found = train(setting, options, members=MEMBERS, codec="fp32")
    streams, inner = inputs(setting)
    expected = async_diloco(
        setting.model, streams, steps=30, every=5, sync_every=15, inner=inner, outer_lr=0.7,
        momentum=0.8, look_ahead=look_ahead,
    )  # fmt: skip
    compare(found, [15, 30], expected)


def test_halos_equals_the_reference_to_reassociation(setting: Setting) -> None:
    options = Hierarchical(
        every=3, anchor_every=15, merge_every=4, mix=0.25, region_lr=0.7, region_momentum=0.6,
        outer_lr=0.8, outer_momentum=0.5, dynamic=False,
    )  # fmt: skip
    found = train(setting, options, members=MEMBERS, codec="fp32")
    streams, inner = inputs(setting)
    hierarchy = Hierarchy(
        flat(setting.model), members=MEMBERS, regions=2, local=Step(lr=0.7, momentum=0.6),
        above=Step(lr=0.8, momentum=0.5), merge_every=4, mix=0.25,
    )  # fmt: skip
    expected = halos(
        setting.model, streams, steps=30, every=3, sync_every=15, inner=inner, hierarchy=hierarchy
    )
    compare(found, [15, 30], expected)


def compare(found: Outcome, steps: Iterable[int], expected: Trajectory) -> None:
    """Compare the common parameters after every round, step by step."""
    for step, vector in zip(steps, expected.rounds, strict=True):
        assert (found.kept[step] - vector).norm() / vector.norm() < 2e-5
    assert torch.equal(flat(found.model), found.kept[30])
