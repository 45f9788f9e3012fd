from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from atoll.codec import make_codec
from atoll.errors import ConfigError, LossNotFinite
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.methods.decentralized import Gossip
from atoll.methods.every_step import EveryStep
from atoll.strategies.graphs import mixing, pushing, spectral_gap
from atoll.strategies.outer.gossip import MASS
from tests.contracts.strategy_suite import (
    Reference,
    Run,
    StrategySuite,
    adamw,
    batches,
    sgd,
    start_run,
)
from tests.patience import PATIENCE_S


def mixed(weights: Tensor, vectors: list[Tensor]) -> list[Tensor]:
    return list(weights @ torch.stack(vectors))


def assign(those: Reference, vectors: list[Tensor]) -> None:
    for model, vector in zip(those.models, vectors, strict=True):
        start = 0
        with torch.no_grad():
            for parameter in model.parameters():
                piece = vector[start : start + parameter.numel()]
                parameter.copy_(piece.view(parameter.shape))
                start += parameter.numel()


class GossipSuite(StrategySuite):
    """Members carry models of their own; round 0 finds that all start alike."""

    identical = False
    options: ClassVar[Gossip]

    def reference(self, members: int, steps: int) -> Tensor:
        """Return the mean of x_i = sum_j W_ij x_j + u_i, or of push-sum's X_i."""
        those = Reference.make(members, adamw)
        round_, mass = 1, torch.ones(members, dtype=torch.float64)
        weigh = pushing if self.options.push_sum else mixing
        for step in range(1, steps + 1):
            before = those.vectors()
            for member in range(members):
                those.gradient_step(member)
            if step % self.options.every:
                continue
            weights = weigh(self.options.graph, members, round_=round_)
            numerators = [m * x for m, x in zip(mass, before, strict=True)]
            moves = [now - x for now, x in zip(those.vectors(), before, strict=True)]
            round_, mass = round_ + 1, weights @ mass if self.options.push_sum else mass
            new = [x + u for x, u in zip(mixed(weights, numerators), moves, strict=True)]
            assign(those, [x / m for x, m in zip(new, mass, strict=True)])
        total = sum((m * x for m, x in zip(mass, those.vectors(), strict=True)), torch.zeros(1))
        assert isinstance(total, Tensor)
        return total / mass.sum()


class TestRing(GossipSuite):
    name = "gossip"
    options = Gossip()


class TestOnePeer(GossipSuite):
    """With rounds every other step, and a codec."""

    name = "gossip_one_peer"
    options = Gossip(graph="one-peer", every=2)
    codec = "int8"


class TestPushSum(GossipSuite):
    name = "gossip_push_sum"
    options = Gossip(graph="random", push_sum=True)
    tolerance = 5e-6

    @pytest.mark.skip(reason="a random graph goes by place: see test_members_follow_the_formula")
    def test_the_order_of_members_only_reassociates_sums(self) -> None: ...


def run_of(options: Gossip, group: Group, *, codec: str = "fp32", frozen: bool = False) -> Run:
    """Return a member that starts from its own parameters."""
    run = start_run(options, group, int(group.me[1:]), codec=codec, optimizer=sgd, begin=False)
    generator = torch.Generator().manual_seed(int(group.me[1:]))
    with torch.no_grad():
        for parameter in run.task.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    if frozen:
        for each in run.task.optimizer.param_groups:
            each["lr"] = 0.0
    return run


def trajectories(
    options: Gossip, *, members: int, steps: int, codec: str = "fp32", frozen: bool = True
) -> list[Tensor]:
    """Return all members' parameters after every step, (members, n) each."""

    def body(group: Group) -> list[Tensor]:
        run = run_of(options, group, codec=codec, frozen=frozen)
        found = [run.vector()]
        for _ in range(steps):
            run.train(1)
            found.append(run.vector())
        return found

    runs = MemoryGroups(members).together(body)
    return [torch.stack(rows).double() for rows in zip(*runs, strict=True)]


def deviation(rows: Tensor) -> float:
    return float((rows - rows.mean(0)).norm())


@pytest.mark.parametrize("codec", ["fp32", "int8", "feedback(int8)"])
@pytest.mark.parametrize("graph", ["ring", "torus", "exponential", "one-peer", "complete"])
def test_mean_is_preserved_whatever_the_codec_loses(graph: str, codec: str) -> None:
    rows = trajectories(Gossip(graph=graph), members=4, steps=8, codec=codec)
    for after in rows[1:]:
        assert (after.mean(0) - rows[0].mean(0)).abs().max() < 1e-6
    assert deviation(rows[-1]) < 0.1 * deviation(rows[0])


@pytest.mark.parametrize(("graph", "members"), [("ring", 8), ("torus", 9)])
def test_members_come_together_as_fast_as_the_gap_says(graph: str, members: int) -> None:
    rows = trajectories(Gossip(graph=graph), members=members, steps=14)
    rho = 1 - spectral_gap(mixing(graph, members))
    assert deviation(rows[14]) / deviation(rows[13]) == pytest.approx(rho, rel=0.01)


def test_eight_members_reach_the_mean_in_three_steps() -> None:
    rows = trajectories(Gossip(graph="one-peer"), members=8, steps=3)
    assert deviation(rows[2]) > 0.1
    assert (rows[3] - rows[0].mean(0)).abs().max() < 1e-6


def test_complete_graph_is_data_parallel_sgd() -> None:
    """Where a mean of gradients is the gradient at the mean: the same inputs, other targets."""

    def train(options: Gossip | EveryStep) -> Tensor:
        def body(group: Group) -> Tensor:
            slot = int(group.me[1:])
            model = nn.Linear(5, 2)
            with torch.no_grad():
                model.weight.fill_(0.1)
                model.bias.zero_()
            run = start_run(options, group, 0, optimizer=sgd, model=model, clip=1e9)
            run.stream = ((x, y + slot) for x, y in batches(0))
            run.train(8)
            run.outer.finish(run.task)
            return run.vector()

        return MemoryGroups(3).together(body)[1]

    parallel = train(EveryStep(weight="equal"))
    assert (train(Gossip(graph="complete")) - parallel).abs().max() < 1e-6


def test_push_sum_finds_the_mean_where_members_give_unevenly() -> None:
    options = Gossip(graph="random", push_sum=True)

    def body(group: Group) -> tuple[Tensor, Tensor, float]:
        run = run_of(options, group, frozen=True)
        before = run.vector()
        run.train(40)
        return before, run.vector(), float(run.outer.state_dict()[MASS])

    found = MemoryGroups(4).together(body)
    mean = torch.stack([before for before, _, _ in found]).mean(0)
    for _, after, _ in found:
        assert (after - mean).abs().max() < 1e-4
    masses = [mass for _, _, mass in found]
    assert sum(masses) == pytest.approx(4.0, abs=1e-9)
    assert max(masses) - min(masses) > 0.1


@pytest.mark.parametrize("push_sum", [False, True])
def test_lost_neighbour_leaves_its_weight(push_sum: bool) -> None:
    """In the attempt in which it is lost it has been planned for."""
    options = Gossip(graph="exponential" if push_sum else "ring", push_sum=push_sum)
    groups = MemoryGroups(4, timeout_s=PATIENCE_S)

    def body(group: Group) -> tuple[Tensor, Tensor, Tensor]:
        run = run_of(options, group, frozen=True)
        if group.me == "w2":
            groups.kill("w2", at="send")
        before = run.vector()
        run.train(1)
        assert run.results[0].contributors == ("w0", "w1", "w3")
        return before, run.vector(), run.outer.state_dict()[MASS].float()

    found = [each for each in groups.run(body) if not isinstance(each, BaseException)]
    assert len(found) == 3
    before, after, masses = (torch.stack(rows) for rows in zip(*found, strict=True))
    assert float(masses.sum()) == pytest.approx(3.0)
    assert (before.mean(0) - (masses @ after) / 3).abs().max() < 1e-6
    assert deviation(after) < deviation(before)


def test_a_lost_neighbour_changes_nothing_where_all_are_equal() -> None:
    """In a directed graph: rows still add up to 1."""
    groups = MemoryGroups(4, timeout_s=PATIENCE_S)

    def body(group: Group) -> Tensor:
        run = start_run(Gossip(graph="exponential"), group, 0, optimizer=sgd)
        for each in run.task.optimizer.param_groups:
            each["lr"] = 0.0
        if group.me == "w2":
            groups.kill("w2", at="send")
        before = run.vector()
        run.train(1)
        return run.vector() - before

    found = [each for each in groups.run(body) if not isinstance(each, BaseException)]
    assert len(found) == 3
    assert float(torch.stack(found).abs().max()) < 1e-6


def test_a_newcomer_takes_over_what_a_donor_is() -> None:
    """Without the donor's counters and mass, as `shared_state` gives it."""
    groups = MemoryGroups(2)

    def body(group: Group) -> Run:
        run = start_run(Gossip(graph="random", push_sum=True), group, int(group.me[1:]))
        run.train(5)
        return run

    donor = groups.together(body)[0]
    copy = start_run(Gossip(graph="random", push_sum=True), groups[1], 1, begin=False)
    copy.task.step, copy.task.round = donor.task.step, donor.task.round
    shared = donor.outer.shared_state()
    assert set(shared) == {"shared.base"}
    copy.outer.load_state_dict(shared)
    copy.outer.rejoin(copy.task)
    assert copy.outer.committed(copy.task).base == donor.outer.committed(donor.task).base
    assert float(copy.outer.state_dict()[MASS]) == 1.0
    assert not copy.outer.one_state


def test_non_finite_parameters_are_refused() -> None:
    groups = MemoryGroups(3, timeout_s=PATIENCE_S)

    def body(group: Group) -> Tensor:
        run = start_run(Gossip(), group, int(group.me[1:]))
        run.train(1)
        if group.me == "w1":
            with torch.no_grad():
                run.task.parameters()[0].fill_(float("nan"))
            try:
                run.task.step += 1
                run.outer.gradients(run.task)
                run.outer.sync(run.task)
            finally:
                group.close()
        run.train(3)
        return run.vector()

    first, sick, last = groups.run(body)
    assert isinstance(sick, LossNotFinite)
    for healthy in (first, last):
        assert isinstance(healthy, Tensor)
        assert torch.isfinite(healthy).all()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (Gossip(every=0), "every"),
        (Gossip(graph="tours"), "torus"),
        (Gossip(graph="random"), "push_sum"),
    ],
)
def test_options_that_cannot_work_are_refused(options: Gossip, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        options.build()


@pytest.mark.parametrize("codec", ["topk:0.1", "randomk:0.1", "feedback(randomk:0.1)"])
def test_codecs_that_send_a_few_values_are_refused(codec: str) -> None:
    outer: Any = Gossip().build()
    run = start_run(Gossip(), MemoryGroups(1)[0], 0)
    with pytest.raises(ConfigError, match="int8"):
        outer.setup(run.task, group=MemoryGroups(1)[0], codec=make_codec(codec))
