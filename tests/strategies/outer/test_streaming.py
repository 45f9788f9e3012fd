from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.codec import make_codec
from atoll.errors import ConfigError
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.group.single import SingleGroup
from atoll.methods.overlapped import Streaming
from atoll.methods.periodic import DiLoCo
from atoll.strategies.outer.streaming_plan import StreamingPlan
from tests.contracts.strategy_suite import (
    Reference,
    Run,
    StrategySuite,
    adamw,
    batches,
    plain_training,
    start_run,
    train_together,
)

FIRST = slice(0, 18)
"""Of the suite's model: what the first fragment of two has."""
SECOND = slice(18, 26)


def formula(members: int, steps: int, options: Streaming) -> Tensor:
    """Return the common parameters by the paper's algorithm, in double precision."""
    those = Reference.make(members, adamw)
    theta, parts = those.vectors()[0], [FIRST, SECOND]
    velocity: list[Tensor | None] = [None, None]
    last, sent = [0, 0], None
    half, alpha = options.every // 2, options.mix
    delay = 0 if isinstance(options.delay, str) else options.delay

    def outer(p: int, mean: Tensor, mix: float) -> None:
        before = velocity[p]
        now = mean if before is None else options.outer_momentum * before + mean
        velocity[p] = now
        theta[parts[p]] -= options.outer_lr * (mean + options.outer_momentum * now)
        for model, vector in zip(those.models, those.vectors(), strict=True):
            vector[parts[p]] = mix * vector[parts[p]] + (1 - mix) * theta[parts[p]]
            torch.nn.utils.vector_to_parameters(vector.float(), model.parameters())

    def mean_of(p: int) -> Tensor:
        return torch.stack([theta[parts[p]] - v[parts[p]] for v in those.vectors()]).mean(0)

    for step in range(1, steps + 1):
        for member in range(members):
            those.gradient_step(member)
        if step % half == 0:
            p = (step // half - 1) % 2
            sent, last[p] = (step, p, mean_of(p)), step
        if sent is not None and (step == sent[0] + delay or step == steps):
            outer(sent[1], sent[2], alpha)
            sent = None
    rest = [(p, mean_of(p)) for p in (0, 1) if last[p] < steps]
    for p, mean in rest:
        outer(p, mean, 0.0)
    return theta


class TestStreaming(StrategySuite):
    name = "streaming"
    options = Streaming(
        every=4, fragments=2, delay=1, mix=0.5, outer_lr=0.4, outer_momentum=0.9
    )  # fmt: skip
    identical = False

    def same_as_plain(self) -> Any:
        return Streaming(every=4, fragments=2, delay=0, mix=0.0, outer_lr=1.0, outer_momentum=0.0)

    def reference(self, members: int, steps: int) -> Tensor:
        return formula(members, steps, self.options)


class TestStreamingLate(StrategySuite):
    """A longer delay, an earlier stop of mixing, neighbours together, a coarse codec."""

    name = "streaming_late"
    options = Streaming(
        every=6, fragments=2, delay=2, mix=0.25, pattern="sequential", outer_lr=0.7,
        outer_momentum=0.9,
    )  # fmt: skip
    codec = "int8"
    identical = False

    def same_as_plain(self) -> Any:
        return replace(self.options, delay=0, mix=0.0, outer_lr=1.0, outer_momentum=0.0)

    def reference(self, members: int, steps: int) -> Tensor:
        return formula(members, steps, self.options)


def diloco_like(**settings: Any) -> Streaming:
    return Streaming(delay=0, mix=0.0, outer_lr=0.7, outer_momentum=0.9, **settings)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(diloco_like(every=3, fragments=1), id="one fragment"),
        pytest.param(diloco_like(every=3, fragments=2, staggered=False), id="all at once"),
    ],
)
def test_one_fragment_or_equal_offsets_are_diloco_bit_for_bit(options: Streaming) -> None:
    streaming = train_together(options, members=3, steps=10)
    diloco = train_together(DiLoCo(every=3), members=3, steps=10)
    for ours, theirs in zip(streaming, diloco, strict=True):
        assert torch.equal(ours.vector(), theirs.vector())
        assert ours.losses == theirs.losses
        assert all(map(torch.equal, ours.rounds, theirs.rounds))


def test_members_with_own_parameters_are_independent() -> None:
    options = Streaming(every=4, fragments=2, delay=1, mix=1.0)

    def body(group: Group) -> Tensor:
        run = start_run(options, group, 0)
        run.train(9)
        return run.vector()

    for vector in MemoryGroups(2).together(body):
        assert torch.equal(vector, plain_training(9))


def test_no_round_but_the_last_is_larger_than_a_share_of_dilocos() -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])

    def body(group: Group) -> Run:
        task_model = torch.nn.Sequential(torch.nn.Linear(5, 8), *model, torch.nn.Linear(8, 2))
        run = start_run(Streaming(every=8, fragments=2), group, 0, model=task_model)
        run.train(8)
        return run

    runs = MemoryGroups(2).together(body)
    whole = 4 * sum(p.numel() for p in runs[0].task.parameters())
    sizes = [result.sent_bytes for result in runs[0].results]
    assert sizes
    assert max(sizes) <= whole / 2 + 4 * 40, "layers are dealt whole: the ends differ by a layer"


@pytest.mark.parametrize("members", [1, 2])
def test_steps_on_the_same_data_come_first_and_send_nothing(members: int) -> None:
    options = Streaming(every=4, fragments=2, shared_steps=5)

    def body(group: Group) -> tuple[Tensor, int, int]:
        run = start_run(options, group, 0)
        before = group.sent_bytes
        run.train(5)
        shared, sent = run.vector(), group.sent_bytes - before
        run.train(3)
        return shared, sent, run.task.round

    for shared, sent, rounds in MemoryGroups(members).together(body):
        assert torch.equal(shared, plain_training(5))
        assert sent == (128 if members > 1 else 0), "all compare their digests once"
        assert rounds == 3, "both comparisons, and the first fragment's round at step 7"


def test_fragments_have_own_velocity_and_codec_memory() -> None:
    runs = train_together(TestStreaming.options, members=2, steps=9, codec="feedback(e3m0)")
    state = runs[0].outer.state_dict()
    assert state["shared.outer.0.velocity"].shape == (18,)
    assert state["shared.outer.1.velocity"].shape == (8,)
    memories = [key for key in state if key.startswith("own.codec.") and "fragment" in key]
    assert {key.rpartition("fragment")[2][0] for key in memories} == {"0", "1"}


def test_common_parameters_are_swapped_in_temporarily() -> None:
    def body(group: Group) -> tuple[Tensor, Tensor, Tensor, str]:
        run = start_run(TestStreaming.options, group, int(group.me[1:]))
        run.train(7)
        own = run.vector()
        with run.outer.evaluating(run.task):
            common = run.vector()
        return own, common, run.vector(), run.outer.digest(run.task)

    first, second = MemoryGroups(2).together(body)
    assert torch.equal(first[1], second[1])
    assert first[3] == second[3]
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[0], first[2])


def test_a_state_of_other_fragments_is_refused() -> None:
    state = start_run(TestStreaming.options, SingleGroup(), 0).outer.state_dict()
    other = start_run(Streaming(every=4, fragments=1), SingleGroup(), 0)
    with pytest.raises(ConfigError, match="other fragments"):
        other.outer.load_state_dict(state)


def begins(plan: StreamingPlan, *, last: int) -> list[tuple[int, list[int]]]:
    """Return the rounds of a run that ends at `last`, each taken after the delay."""
    plan.last, found, step = last, list[tuple[int, list[int]]](), 0
    while (step := plan.next_due(step)) <= last:
        found.append((step, plan.due_at(step)))
        step += plan.delay
    return found


def test_what_would_last_beyond_a_known_end_is_left_to_the_end() -> None:
    plan = StreamingPlan(every=12, count=3, delay=1, since=0, staggered=True)
    assert begins(plan, last=24)[-2:] == [(16, [0]), (20, [1])]
    assert list(plan.rounds(24)) == [[0], [1], [2], [0], [1], [0, 1, 2]]
    assert begins(plan, last=26)[-2:] == [(20, [1]), (24, [2])], "over at step 25"
    assert begins(plan, last=25)[-2:] == [(16, [0]), (20, [1])], "over at the end"
    assert (plan.next_due(20), plan.due_at(28)) == (28, [0]), "training goes on"


@pytest.mark.parametrize(("delay", "last"), [(0, 24), (0, 29), (1, 25), (3, 24), (3, 30)])
def test_every_round_is_over_before_the_next_and_the_end(delay: int, last: int) -> None:
    plan = StreamingPlan(every=16, count=4, delay=delay, since=3, staggered=True)
    shared, *found = begins(plan, last=last)
    assert shared[0] == 3
    assert found
    assert all(a[0] + delay < b[0] for a, b in pairwise([*found, (last, [])]))
    assert [*plan.rounds(last)] == [*(which for _, which in found), [0, 1, 2, 3]]


def test_members_end_with_a_round_of_all_they_trained() -> None:
    def body(group: Group) -> Run:
        run = start_run(Streaming(every=4, fragments=2, delay=1), group, int(group.me[1:]))
        run.task.last = 12
        run.outer.setup(run.task, group=group, codec=make_codec("fp32"))
        run.outer.begin(run.task)
        run.train(12)
        run.note(run.outer.finish(run.task))
        return run

    first, second = MemoryGroups(2).together(body)
    assert torch.equal(first.vector(), second.vector())
    sizes = [result.sent_bytes for result in first.results]
    assert len(sizes) == 6
    assert sizes[-1] == sum(sizes[-3:-1]), "all fragments at once"


# ------------------------------------------------------------------------- delay = "auto"

AUTO = Streaming(every=16, fragments=2, mix=0.0)
"""Rounds every 8 steps; half of that is the delay before one is measured."""


def test_auto_is_the_default_and_starts_with_half_the_gap() -> None:
    assert Streaming().delay == "auto"
    assert StreamingPlan(every=16, count=2, delay="auto", since=0, staggered=True).delay == 4
    assert StreamingPlan(every=2, count=2, delay="auto", since=0, staggered=True).delay == 0
    planned = StreamingPlan(every=16, count=2, delay="auto:2", since=0, staggered=True)
    assert (planned.delay, planned.measured) == (2, True)
    assert StreamingPlan(every=16, count=2, delay="auto:99", since=0, staggered=True).delay == 7


def test_delay_follows_the_verdict_of_the_round_before_it() -> None:
    groups = MemoryGroups(2)
    groups.coordinator.delay = 2

    def body(group: Group) -> list[int]:
        run = start_run(AUTO, group, int(group.me[1:]))
        steps = run.train_noting(20)
        groups.coordinator.delay = 50  # the link has become slow
        return steps + run.train_noting(28)

    for steps in groups.together(body):
        assert steps == [8 + 4, 16 + 2, 24 + 2, 32 + 7, 40 + 7], "7: below the gap of 8 steps"


@pytest.mark.parametrize(
    "options",
    [AUTO, replace(AUTO, every=8, fragments=1), replace(AUTO, every=8, staggered=False)],
    ids=["in turns", "whole", "at once"],
)
def test_auto_equals_a_fixed_delay_of_as_many_steps(options: Streaming) -> None:
    groups = MemoryGroups(2)
    groups.coordinator.delay = 4

    def body(group: Group) -> Run:
        run = start_run(options, group, int(group.me[1:]))
        run.train(40)
        run.note(run.outer.finish(run.task))
        return run

    fixed = train_together(replace(options, delay=4), members=2, steps=40)
    for ours, theirs in zip(groups.together(body), fixed, strict=True):
        assert torch.equal(ours.vector(), theirs.vector())


@pytest.mark.parametrize("cut", [9, 15])
def test_a_resumed_run_keeps_the_measured_delay(cut: int) -> None:
    groups = MemoryGroups(2)
    groups.coordinator.delay = 3

    def body(group: Group) -> list[int]:
        run = start_run(AUTO, group, int(group.me[1:]))
        run.train(cut)
        state = {k: v.clone() for k, v in run.outer.state_dict().items()}
        done = run.task
        again = start_run(AUTO, group, 0, model=done.model, begin=False)
        again.task.step, again.task.tokens, again.task.round = done.step, done.tokens, done.round
        again.outer.load_state_dict(state)
        again.stream = batches(int(group.me[1:]), start=cut)
        return again.train_noting(30 - cut)

    for steps in groups.together(body):
        assert steps == [when for when in (12, 19, 27) if when > cut]


def test_rounds_are_even_and_the_last_carries_the_rest() -> None:
    plan = StreamingPlan(every=10, count=3, delay=1, since=2, staggered=True)
    due, step = [], 2
    for _ in range(6):
        step = plan.next_due(step)
        due.append((step, plan.due_at(step)))
    assert due == [(5, [0]), (8, [1]), (12, [2]), (15, [0]), (18, [1]), (22, [2])]
    assert plan.next_due(0) == 2
    assert list(plan.rounds(16)) == [[0], [1], [2], [0], [0, 1, 2]]
    assert list(plan.rounds(1)) == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (Streaming(every=12, fragments=4, delay=3), "delay = 2"),
        (Streaming(every=3, fragments=4), "fragments = 3 or fewer"),
        (Streaming(every=0), "1 or more"),
        (Streaming(fragments=0), "1 or more"),
        (Streaming(mix=1.5), "0 to 1"),
        (Streaming(delay="soon"), 'delay = "auto"'),
        (Streaming(pattern="stride"), "strided"),
        (Streaming(weight="size"), "tokens"),
        (Streaming(outer_momentum=1.0), "below 1"),
    ],
)
def test_options_out_of_range_are_refused_with_what_works(options: Streaming, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        options.build()
