"""What `[strategy]` says about rules and collectives reaches the group, on real routes too."""

from __future__ import annotations

import pytest
import torch

from atoll.codec.registry import make_codec
from atoll.config import parse_spec
from atoll.errors import AtollError, ConfigError, GroupError
from atoll.group.aggregation import Aggregation
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.group.period import PeriodReport
from atoll.methods.every_step import EveryStep
from atoll.methods.periodic import DiLoCo
from atoll.strategies.resolve import resolve
from tests.contracts.group_suite import together
from tests.contracts.strategy_suite import Run, small_model, start_run, train_together
from tests.group.hub_world import HubWorld, NodeInName
from tests.patience import PATIENCE_S
from tests.strategies.on_routes import wide_model

STEPS = 4


def test_words_of_a_job_file_become_the_aggregation() -> None:
    text = (
        '[strategy]\npreset = "diloco"\naggregate = "trimmed:1"\nadmission = "norms:3"\nevery = 9'
    )
    resolved = resolve(parse_spec(text).strategy)
    assert resolved.aggregation == Aggregation(aggregate="trimmed:1", admission="norms:3")
    assert isinstance(resolved.method, DiLoCo)
    assert resolved.method.every == 9
    assert resolved.names() == {
        "inner": "local", "outer": "diloco", "codec": "feedback(int8)",
        "aggregate": "trimmed:1", "admission": "norms:3",
    }  # fmt: skip
    assert resolve(parse_spec("[strategy]").strategy).aggregation == Aggregation()


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ('aggregate = "trimed:1"', "did you mean 'trimmed'"),
        ('collective = "buterfly"', "did you mean 'butterfly'"),
        ('admission = "norm"', "did you mean 'norms'"),
        ('agregate = "median"', "did you mean 'aggregate'"),
    ],
)
def test_typing_errors_are_answered_with_the_nearest_word(line: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        resolve(parse_spec(f"[strategy]\n{line}").strategy).build()


def set_aggregation(group: Group, **words: str) -> Group:
    group.aggregation = Aggregation(**words)
    return group


@pytest.mark.parametrize("collective", ["ring", "butterfly", "tree", "hierarchical", "star"])
def test_per_step_collective_equals_training_in_memory(node: NodeInName, collective: str) -> None:
    world, model = HubWorld(node, 3, route="direct"), wide_model()

    def member(group: Group) -> Run:
        set_aggregation(group, collective=collective)
        run = start_run(EveryStep(), group, int(group.me[1:]), model=model)
        run.train(STEPS)
        return run

    runs = together(world, member)
    expected = train_together(EveryStep(), members=3, steps=STEPS, model=model)
    for rank, (run, group) in enumerate(zip(runs, world.groups, strict=True)):
        assert torch.equal(run.vector(), runs[0].vector())
        assert (run.vector() - expected[0].vector()).abs().max() < 1e-4
        traffic = run.outer.traffic(32_002, 3, steps=STEPS, rank=rank)
        assert group.sent_bytes == pytest.approx(traffic.direct_sent_bytes, rel=0.01)
        assert group.received_bytes == pytest.approx(traffic.direct_received_bytes, rel=0.01)
    world.close()


def test_coordinate_rules_train_direct_as_in_memory(node: NodeInName) -> None:
    world = HubWorld(node, 3, route="direct")

    def member(group: Group) -> Run:
        set_aggregation(group, aggregate="median")
        run = start_run(DiLoCo(every=2), group, int(group.me[1:]), codec="feedback(int8)")
        run.train(STEPS)
        assert {tuple(group.members)} == {("w0", "w1", "w2")}
        return run

    runs = together(world, member)
    expected = MemoryGroups(3).together(member)
    for run in runs:
        assert torch.equal(run.vector(), runs[0].vector())
        assert (run.vector() - expected[0].vector()).abs().max() < 1e-6
    world.close()


def test_under_a_robust_rule_who_starts_differently_is_refused() -> None:
    groups = MemoryGroups(3, timeout_s=PATIENCE_S)

    def member(group: Group) -> Run:
        set_aggregation(group, aggregate="median")
        try:
            return start_run(
                EveryStep(), group, 0, model=small_model(seed=8 if group.me == "w0" else 3)
            )
        except AtollError:
            group.close()
            raise

    first, second, third = groups.run(member)
    assert isinstance(first, GroupError)
    assert "same seed" in str(first)
    for run in (second, third):
        assert isinstance(run, Run)
        assert torch.equal(
            run.vector(), torch.cat([p.flatten() for p in small_model().parameters()])
        )


def test_rule_with_too_few_members_waits() -> None:
    """Four of five go on under krum:1 only when the fifth is back."""
    groups = MemoryGroups(5, timeout_s=PATIENCE_S)

    def member(group: Group) -> str:
        set_aggregation(group, aggregate="krum:1")
        run = start_run(EveryStep(), group, int(group.me[1:]))
        if group.me == "w4":
            group.close()
            return "gone"
        group.join(PeriodReport(run.task.round, run.outer.committed(run.task).base))
        with pytest.raises(GroupError, match="too few contributions for the aggregate krum:1"):
            group.reduce([torch.ones(3)], codec=make_codec("fp32"), weight=1.0).wait()
        return group.commit(None, ok=False, reason="nothing").reason

    assert all("nothing" in reason or reason == "gone" for reason in groups.together(member))
