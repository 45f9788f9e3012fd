"""HALoS: a model per region, merged into a global one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.errors import ConfigError, WireError
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.methods.parameter_server import Asynchronous, Hierarchical
from atoll.reducer.region_rule import RegionRule, server_rule
from atoll.reducer.worker_clocks import WorkerClocks
from atoll.wire.parameter_server_messages import Setup
from tests.contracts.strategy_suite import (
    Reference,
    Run,
    StrategySuite,
    adamw,
    start_run,
    train_together,
)
from tests.patience import PATIENCE_S
from tests.reference.halos import Hierarchy, Step

EVERY, ANCHOR = 2, 6
OPTIONS = Hierarchical(
    every=EVERY, anchor_every=ANCHOR, merge_every=3, mix=0.5, region_lr=0.8, region_momentum=0.6,
    outer_lr=0.9, outer_momentum=0.4,
)  # fmt: skip
PLAIN: dict[str, Any] = {
    "region_optimizer": "sgd", "region_lr": 1.0, "region_momentum": 0.0, "mix": 1.0,
}  # fmt: skip
"""With these a region passes on what it gets, and takes what comes back."""
ELEMENTS = 30


class TestHalos(StrategySuite):
    """Members are equally fast; in a group of three the first region has two of them."""

    name = "hierarchical"
    options = OPTIONS
    codec = "int8"

    def same_as_plain(self) -> Any:
        return Hierarchical(
            every=EVERY, anchor_every=ANCHOR, outer_optimizer="sgd", outer_lr=1.0, **PLAIN
        )

    def reference(self, members: int, steps: int) -> Tensor:
        return formula(list(range(members)), steps)

    def test_the_order_of_members_only_reassociates_sums(self) -> None:
        """Order and region count, so the result is the formula's with the data exchanged."""
        runs = train_together(self.options, members=2, steps=6, slots=(1, 0))
        assert (runs[0].vector().double() - formula([1, 0], 6)).abs().max() < self.tolerance


def formula(data: list[int], steps: int) -> Tensor:
    """Return the global model; `data` is what the member of each slot trains on."""
    those = Reference.make(len(data), adamw)
    starts = those.vectors()
    above = Hierarchy(
        starts[0], members=len(data), regions=2, local=Step(lr=0.8, momentum=0.6),
        above=Step(lr=0.9, momentum=0.4), merge_every=3, mix=0.5,
    )  # fmt: skip
    for step in range(1, steps + 1):
        for member in data:
            those.gradient_step(member)
        if step % EVERY and step != steps:
            continue
        found = those.vectors()
        for slot, member in enumerate(data):
            starts[slot] = above.push(slot, starts[slot] - found[member])
            Reference([those.models[member]], [], []).assign(starts[slot])
        if step % ANCHOR == 0 or step == steps:
            starts = [above.meet()] * len(data)
            those.assign(starts[0])
    return starts[0]


def test_servers_make_no_difference_to_the_bits() -> None:
    one, three = (
        train_together(dataclasses.replace(OPTIONS, servers=servers), members=3, steps=10)
        for servers in (1, 3)
    )
    assert torch.equal(one[0].vector(), three[0].vector())


# ------------------------------------------------------------------------------ identities


@pytest.mark.parametrize("regions", [1, 2])
def test_regions_that_pass_everything_on_are_async_diloco(regions: int) -> None:
    """With K = 1, alpha = 1 and no momentum of the regions, one or several of them: bit for bit."""
    outer: dict[str, Any] = {"every": 3, "anchor_every": 6, "outer_lr": 0.7, "outer_momentum": 0.6}
    halos = Hierarchical(regions=regions, merge_every=1, buffer=3, **outer, **PLAIN)
    base = Asynchronous(**outer)
    ours, theirs = (train_together(o, members=3, steps=10) for o in (halos, base))
    assert torch.equal(ours[0].vector(), theirs[0].vector())
    assert ours[0].losses == theirs[0].losses


def test_no_push_is_missing_from_a_sync_point() -> None:
    """With plain rules the global model has moved by the sum of all pushes, merged or not."""
    setup = Setup(regions=[2, 1], merge_every=3, mix=0.5, parameters=ELEMENTS)
    rule, theta = server_rule(setup), torch.zeros(ELEMENTS)
    rule.start(theta, {})
    generator = torch.Generator().manual_seed(1)
    total = torch.zeros(ELEMENTS)
    for number in range(11):
        push = torch.randn(ELEMENTS, generator=generator)
        total += push
        rule.apply(theta, push, lr=1.0, region=number % 2)
    assert (theta + total).abs().max() > 0.1, "some is not merged yet"
    assert rule.settle(theta, lr=1.0)
    assert (theta + total).abs().max() < 1e-5
    assert all(torch.equal(rule.model_of(theta, region), theta) for region in range(2))
    assert not rule.settle(theta, lr=1.0), "a second time there is nothing to merge"


def test_a_region_takes_of_the_global_model_at_its_merge_only() -> None:
    setup = Setup(regions=[1, 1], merge_every=2, mix=0.25, parameters=1)
    rule, theta = server_rule(setup), torch.zeros(1)
    rule.start(theta, {})

    def push(region: int, x: float) -> tuple[float, float, float]:
        rule.apply(theta, torch.tensor([x]), lr=0.5, region=region)
        first, second = (float(rule.model_of(theta, number)) for number in range(2))
        return float(theta), first, second

    assert push(0, 1.0) == (0.0, -1.0, 0.0)
    assert push(1, 4.0) == (0.0, -1.0, -4.0)
    # u = 2, theta = -0.5 * 2 ; -2 + 0.25 (-1 + 2)
    assert push(0, 1.0) == (-1.0, -1.75, -4.0)
    assert push(1, 2.0) == (-4.0, -1.75, -5.5)


# ------------------------------------------------------------------------ members and servers


def test_members_of_a_region_share_a_model_others_do_not() -> None:
    groups = MemoryGroups(4, timeout_s=PATIENCE_S)

    def body(group: Group) -> Run:
        options = Hierarchical(every=2, anchor_every=100, merge_every=50)
        run = start_run(options, group, int(group.me[1:]))
        run.train(9)
        while (result := run.outer.finish(run.task)) is not None:
            run.note(result)
        return run

    runs = groups.together(body)
    server = groups.coordinator.servers.server()
    regions = {name: clock.region for name, clock in server.clocks.workers.items()}
    assert regions == {"w0": 0, "w1": 0, "w2": 1, "w3": 1}
    assert all(torch.equal(run.vector(), runs[0].vector()) for run in runs)


def test_a_latecomer_joins_the_smallest_region() -> None:
    clocks = WorkerClocks(["w0", "w1", "w2"], regions=2)
    assert [worker.region for worker in clocks.workers.values()] == [0, 0, 1]
    assert clocks.enter("w3").region == 1
    clocks = WorkerClocks(["w0"], regions=3)
    assert [clocks.enter(name).region for name in ("w1", "w2", "w3")] == [1, 2, 0]


def test_a_restarted_server_is_loaded_with_a_regions_model() -> None:
    groups = MemoryGroups(3, timeout_s=PATIENCE_S)

    def body(group: Group) -> Run:
        options = Hierarchical(every=2, anchor_every=100, merge_every=2)
        run = start_run(options, group, int(group.me[1:]))
        run.train(5)
        if group.me == "w1":
            groups.coordinator.servers.restart()
        run.train(7)
        while (result := run.outer.finish(run.task)) is not None:
            run.note(result)
        return run

    runs = groups.together(body)
    assert len(runs[0].results) == 2  # one to load the server anew, one at the end
    assert all(torch.equal(run.vector(), runs[0].vector()) for run in runs)
    assert groups.coordinator.servers.server().setup.regions == [2, 1]


def test_momenta_of_regions_are_part_of_the_state() -> None:
    groups = MemoryGroups(2, timeout_s=PATIENCE_S)

    def body(group: Group) -> dict[str, Tensor]:
        run = start_run(OPTIONS, group, int(group.me[1:]))
        run.train(ANCHOR)
        return run.outer.state_dict()

    first, second = groups.together(body)
    names = [name for name in first if name.startswith("shared.rule.0.region-")]
    assert sorted(names) == [
        f"shared.rule.0.region-{region}.{key}"
        for region in (0, 1)
        for key in ("arrived", "momentum")
    ]
    assert all(torch.equal(first[name], second[name]) for name in names)
    assert bool(first["shared.rule.0.region-1.momentum"].any())


# ------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "options",
    [
        Hierarchical(every=0),
        Hierarchical(regions=0),
        Hierarchical(regions=65),
        Hierarchical(merge_every=0),
        Hierarchical(mix=0.0),
        Hierarchical(mix=1.5),
        Hierarchical(buffer=-1),
        Hierarchical(outer_optimizer="adamw"),
        Hierarchical(region_optimizer="adamw"),
        Hierarchical(region_momentum=0.0),
        Hierarchical(region_lr=0.0),
    ],
)
def test_options_out_of_range_are_refused(options: Hierarchical) -> None:
    with pytest.raises(ConfigError):
        options.build()


def test_more_regions_than_members_are_refused() -> None:
    with pytest.raises(ConfigError, match="without members"):
        Hierarchical(regions=3).check(nodes=2, min_nodes=2, optimizer="adamw")


@pytest.mark.parametrize("setup", [Setup(regions=[1] * 65), Setup(regions=[1], merge_every=0)])
def test_a_server_takes_no_hierarchy_that_cannot_be(setup: Setup) -> None:
    with pytest.raises(WireError, match="hierarchy"):
        RegionRule(setup)
