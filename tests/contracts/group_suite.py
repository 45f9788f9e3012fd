"""What every group must do, whatever carries its tensors. Each backend's test class inherits it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import pytest
import torch
from torch import Tensor

from atoll.codec.registry import make_codec
from atoll.errors import DeadlineExceeded, GroupError, LeftBehind
from atoll.group.base import Group, Reduced
from atoll.group.period import PeriodReport
from atoll.group.routes import relay
from atoll.group.run_round import CommittedMean, mean_exchange, run_round
from atoll.wire.messages import Verdict
from tests.patience import PATIENCE_S, PROMPT_S

T = TypeVar("T")

CODECS = ["fp32", "fp16", "bf16", "int8", "feedback(int8)"]
GROWING = ["fp32", "feedback(int8)"]
"""Those that are tried with every number of members: exact, and coarse with a memory."""
TOLERANCE = {"fp32": 1e-6, "fp16": 1e-3, "bf16": 8e-3}


class World(Protocol):
    """n members of one job, and a way to lose one."""

    counts_header_bytes: bool
    """Whether `sent_bytes` includes the headers of the relay."""

    def run(self, function: Callable[[Group], T]) -> list[T | BaseException]:
        """Call the function once per member, each on a thread; errors take results' place."""
        ...

    def die(self, group: Group) -> None:
        """Let the calling member's process end here, as far as the others can tell."""
        ...


Build = Callable[..., World]


def together(world: World, function: Callable[[Group], T]) -> list[T]:
    results: list[T] = []
    for result in world.run(function):
        if isinstance(result, BaseException):
            raise result
        results.append(result)
    return results


def values(member: str, *shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + int(member[1:]))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def mean64(inputs: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    total = sum(w * x.double() for w, x in zip(weights, inputs, strict=True))
    assert isinstance(total, Tensor)
    return total / sum(weights)


def one_round(
    group: Group,
    xs: Sequence[Tensor],
    *,
    weight: float = 1.0,
    codec: str = "fp32",
    round_: int | None = None,
) -> CommittedMean:
    return run_round(
        group,
        mean_exchange(group, xs, codec=make_codec(codec), weight=weight),
        PeriodReport(group.committed_round if round_ is None else round_, "base"),
    )


def join_in_peace(group: Group) -> None:
    """Join the first round: the world's time limit is for what comes after it."""
    group.join(PeriodReport(0, "base"), deadline=time.monotonic() + PATIENCE_S)


def assert_same_everywhere(results: Sequence[Reduced]) -> None:
    first = results[0]
    for other in results[1:]:
        assert other.digest == first.digest
        assert other.contributors == first.contributors
        assert other.weight == first.weight
        for mine, yours in zip(first.tensors, other.tensors, strict=True):
            assert mine.dtype == torch.float32
            assert torch.equal(mine, yours)


class GroupSuite:
    """Inherit, and give a fixture `build(n, *, timeout_s=...)` that returns a :class:`World`."""

    @pytest.mark.parametrize(
        ("n", "codec"),
        [*((3, codec) for codec in CODECS), *((n, codec) for n in (1, 2, 5) for codec in GROWING)],
    )
    def test_result_is_the_mean_over_the_weights_received(
        self, build: Build, n: int, codec: str
    ) -> None:
        shapes = [(701,), (3, 5), ()]
        weights = [1.0 + slot for slot in range(n)]

        def member(group: Group) -> Reduced:
            xs = values(group.me, *shapes)
            agreed = one_round(group, xs, weight=weights[int(group.me[1:])], codec=codec)
            return agreed.reduced

        results = together(build(n), member)
        assert_same_everywhere(results)
        assert results[0].contributors == tuple(f"w{slot}" for slot in range(n))
        assert results[0].weight == pytest.approx(sum(weights), rel=1e-6)
        for index, shape in enumerate(shapes):
            inputs = [values(f"w{slot}", *shapes)[index] for slot in range(n)]
            got = results[0].tensors[index]
            assert got.shape == torch.Size(shape)
            tolerance = TOLERANCE.get(codec, 0.05) * 3
            error = (got.double() - mean64(inputs, weights)).abs().max()
            assert error <= tolerance, f"{error} in shape {shape}"

    @pytest.mark.parametrize("size", [0, 1, 257, 4099])
    def test_any_size_works_on_any_number_of_members(self, build: Build, size: int) -> None:
        for codec in ("fp32", "int8"):
            results = together(
                build(3),
                lambda group, codec=codec: (
                    one_round(  # type: ignore[misc]
                        group, values(group.me, (size,), (0,)), codec=codec
                    ).reduced
                ),
            )
            assert_same_everywhere(results)
            expected = mean64([values(f"w{slot}", (size,))[0] for slot in range(3)], [1, 1, 1])
            torch.testing.assert_close(
                results[0].tensors[0].double(), expected, atol=0.05, rtol=0.05
            )
            assert results[0].tensors[1].numel() == 0

    def test_integers_are_averaged_exactly(self, build: Build) -> None:
        x = torch.arange(-3000, 3000, dtype=torch.float32)
        results = together(build(3), lambda group: one_round(group, [x]).reduced)
        assert_same_everywhere(results)
        assert torch.equal(results[0].tensors[0], x)

    def test_member_of_weight_zero_leaves_the_result_unchanged(self, build: Build) -> None:
        def member(group: Group) -> Reduced:
            weight = 0.0 if group.me == "w2" else 1.0
            return one_round(group, values(group.me, (999,)), weight=weight).reduced

        results = together(build(3), member)
        assert_same_everywhere(results)
        a, b = values("w0", (999,))[0], values("w1", (999,))[0]
        assert torch.equal(results[0].tensors[0], (a + b) / 2)
        assert results[0].weight == 2.0

    def test_which_member_holds_which_values_hardly_matters(self, build: Build) -> None:
        """Permuting the members changes the order of the sum and nothing else."""
        outcomes = []
        for shift in range(3):

            def member(group: Group, shift: int = shift) -> Reduced:
                slot = (int(group.me[1:]) + shift) % 3
                return one_round(group, values(f"w{slot}", (500,)), weight=1.0 + slot).reduced

            outcomes.append(together(build(3), member)[0].tensors[0])
        for other in outcomes[1:]:
            torch.testing.assert_close(other, outcomes[0], rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("codec", ["fp32", "fp16", "int8"])
    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_values_that_are_not_finite_are_left_out(
        self, build: Build, codec: str, bad: float
    ) -> None:
        def member(group: Group) -> Reduced:
            (x,) = values(group.me, (3000,))
            if group.me == "w1":
                x[17] = bad
            return one_round(group, [x], codec=codec).reduced

        results = together(build(3), member)
        assert_same_everywhere(results)
        assert results[0].contributors == ("w0", "w2")
        assert results[0].weight == 2.0
        expected = mean64([values("w0", (3000,))[0], values("w2", (3000,))[0]], [1, 1])
        torch.testing.assert_close(results[0].tensors[0].double(), expected, atol=0.05, rtol=0.01)

    def test_no_weight_at_all_is_an_error_for_everybody(self, build: Build) -> None:
        told = threading.Barrier(2)  # the vote of one would end the exchange of the other

        def member(group: Group) -> str:
            group.join(PeriodReport(group.committed_round, "base"))
            work = group.reduce(values(group.me, (10,)), codec=make_codec("fp32"), weight=0.0)
            try:
                with pytest.raises(GroupError, match="nothing to average") as caught:
                    work.wait(PATIENCE_S)
            finally:
                told.wait(PATIENCE_S)
            verdict = group.commit(None, ok=False, reason=str(caught.value))
            assert not verdict.committed
            return verdict.reason

        for reason in together(build(2), member):
            assert "nothing to average" in reason

    def test_rounds_follow_each_other(self, build: Build) -> None:
        def member(group: Group) -> list[Reduced]:
            found = []
            for round_ in range(4):
                xs = values(group.me, (100,), seed=round_)
                found.append(one_round(group, xs, round_=round_, codec="bf16").reduced)
            assert group.committed_round == 4
            with pytest.raises(LeftBehind):
                group.join(PeriodReport(1, "base"))
            return found

        for results in zip(*together(build(2), member), strict=True):
            assert_same_everywhere(results)

    @pytest.mark.parametrize("codec", ["fp32", "feedback(int8)"])
    def test_aborted_round_is_made_again_with_the_same_result(
        self, build: Build, codec: str
    ) -> None:
        reduced = threading.Barrier(2)  # a vote against would end the other's reduce

        def member(group: Group) -> tuple[Verdict, Reduced, CommittedMean]:
            mine = make_codec(codec)
            xs = values(group.me, (2000,))
            group.join(PeriodReport(0, "base"))
            first = group.reduce(xs, codec=mine, weight=1.0).wait()
            reduced.wait(PROMPT_S)
            verdict = group.commit(first, ok=group.me != "w1", reason="the disk is full")
            again = run_round(
                group, mean_exchange(group, xs, codec=mine, weight=1.0), PeriodReport(0, "base")
            )
            return verdict, first, again

        for verdict, first, again in together(build(2), member):
            assert not verdict.committed
            assert "the disk is full" in verdict.reason
            assert again.verdict.committed
            assert again.reduced.digest == first.digest

    def test_lost_peer_does_not_change_the_mean_of_the_rest(self, build: Build) -> None:
        """Killed before it sent anything: the survivors average what they have."""
        world = build(3)

        def member(group: Group) -> CommittedMean | None:
            if group.me == "w2":
                group.join(PeriodReport(0, "base"))
                world.die(group)
                return None
            return one_round(group, values(group.me, (2000,)), weight=2.0)

        agreed = [result for result in together(world, member) if result is not None]
        assert_same_everywhere([one.reduced for one in agreed])
        assert agreed[0].reduced.contributors == ("w0", "w1")
        a, b = values("w0", (2000,))[0], values("w1", (2000,))[0]
        torch.testing.assert_close(agreed[0].reduced.tensors[0], (a + b) / 2)

    def test_peer_lost_before_its_vote_does_not_undo_the_round(self, build: Build) -> None:
        world = build(3)
        reduced = threading.Barrier(3)  # else others may lack what the lost one still had to send

        def member(group: Group) -> tuple[Reduced, Verdict] | None:
            xs = values(group.me, (2000,))
            group.join(PeriodReport(0, "base"))
            mean = group.reduce(xs, codec=make_codec("fp32"), weight=1.0).wait()
            reduced.wait(PROMPT_S)
            if group.me == "w2":
                world.die(group)
                return None
            return mean, group.commit(mean, ok=True)

        agreed = [result for result in together(world, member) if result is not None]
        assert_same_everywhere([mean for mean, _ in agreed])
        for mean, verdict in agreed:
            assert verdict.committed
            assert mean.contributors == ("w0", "w1", "w2")

    def test_deadline_fails_all_members_without_partial_sums(self, build: Build) -> None:
        world = build(3, timeout_s=1.5)
        both = threading.Barrier(3)

        def member(group: Group) -> tuple[BaseException | None, Verdict, float]:
            join_in_peace(group)
            began = time.monotonic()
            error: BaseException | None = None
            if group.me != "w1":
                with pytest.raises(GroupError) as caught:
                    group.reduce(
                        values(group.me, (100,)), codec=make_codec("fp32"), weight=1.0
                    ).wait()
                error = caught.value
            waited = time.monotonic() - began
            both.wait(PROMPT_S)  # a vote against the round would free the others at once
            return error, group.commit(None, ok=False, reason="too late"), waited

        results = together(world, member)
        errors = [error for error, _, _ in results if error is not None]
        assert len(errors) == 2
        assert any(isinstance(error, DeadlineExceeded) for error in errors)
        assert all(waited < PROMPT_S for _, _, waited in results)
        assert not any(verdict.committed for _, verdict, _ in results)

    @pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
    def test_bytes_are_those_of_the_codec(
        self, build: Build, codec: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(relay, "STALL_S", PATIENCE_S)  # else a busy machine sends more
        size, n = 300_000, 3
        encoded = make_codec(codec).nbytes(size)

        def member(group: Group) -> CommittedMean:
            return one_round(group, values(group.me, (size,)), codec=codec)

        for agreed in together(build(n), member):
            assert agreed.sent_bytes == agreed.reduced.sent_bytes
            if agreed.plan.route == "hierarchical":  # up, down, and inside the site both ways
                assert encoded <= 1.01 * agreed.sent_bytes <= 3.1 * encoded
                assert encoded <= 1.01 * agreed.received_bytes <= 2.1 * encoded
                continue
            expected = encoded if agreed.plan.route == "relay" else 2 * (n - 1) / n * encoded
            assert agreed.sent_bytes == pytest.approx(expected, rel=0.01)
            assert agreed.received_bytes == pytest.approx(expected, rel=0.01)
