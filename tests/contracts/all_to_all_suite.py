"""What every group must do with messages, and with several exchanges in one round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from atoll.codec.base import Packet, Stateless, check_packet, check_vector, output
from atoll.codec.registry import make_codec
from atoll.errors import GroupError
from atoll.group.base import AllToAllResult, Group, PeerMessage, Reduced
from atoll.group.period import PeriodReport
from atoll.group.routes import relay
from atoll.group.run_round import CommittedRound, run_round
from atoll.wire.messages import RoundPlan
from tests.contracts.group_suite import Build, World, join_in_peace, mean64, together, values
from tests.patience import PATIENCE_S

BIG = 300_000
"""Elements of a message that takes several pieces."""


@dataclass(frozen=True)
class Both:
    """What two exchanges of one round came to."""

    first: Reduced | AllToAllResult
    second: Reduced | AllToAllResult

    @property
    def contributors(self) -> tuple[str, ...]:
        return self.second.contributors

    @property
    def digest(self) -> str:
        return self.first.digest + self.second.digest


class Gathered(Stateless):
    """fp32 that says that no mean fits its packets."""

    spec = "fp32"
    needs_allgather = True

    def __init__(self) -> None:
        self.inner = make_codec("fp32")
        self.rounds: list[int] = []
        self.settled: list[bool] = []

    @property
    def base(self) -> Gathered:
        return self

    def set_round(self, round_: int) -> None:
        self.rounds.append(round_)

    def finish(self, *, committed: bool) -> None:
        self.settled.append(committed)

    def encode(self, x: Tensor, *, key: str = "x") -> Packet:
        return self.inner.encode(check_vector(x, role="x"), key=key)

    def decode(self, packet: Packet, *, out: Tensor | None = None) -> Tensor:
        check_packet(packet, self)
        return self.inner.decode(packet, out=output(out, packet.num_elements))

    def decode_add(self, packet: Packet, *, out: Tensor, weight: float = 1.0) -> None:
        self.inner.decode_add(packet, out=out, weight=weight)

    def nbytes(self, elements: int) -> int:
        return self.inner.nbytes(elements)


def packet_of(x: Tensor, codec: str = "fp32") -> Packet:
    return make_codec(codec).encode(x, key="x")


def vector_in(packet: Packet) -> Tensor:
    return make_codec(packet.codec).decode(packet)


def all_to_all_once(
    group: Group, messages: Sequence[PeerMessage], weight: float = 1.0
) -> CommittedRound[AllToAllResult]:
    return run_round(
        group,
        lambda _: group.all_to_all(messages, weight=weight).wait(),
        PeriodReport(group.committed_round, "base"),
    )


def mine(member: str, size: int = 100, *, seed: int = 0) -> Tensor:
    return values(member, (size,), seed=seed)[0]


def mean_once(group: Group, x: Tensor) -> Reduced:
    return group.reduce([x], codec=make_codec("fp32"), weight=1.0).wait()


class AllToAllSuite:
    """Inherit beside :class:`GroupSuite`, with the same fixture `build`."""

    def test_a_message_for_all_reaches_all_bit_for_bit(self, build: Build) -> None:
        def member(group: Group) -> AllToAllResult:
            everybody = ("w0", "w1", "w2")
            message = PeerMessage(everybody, packet_of(mine(group.me), "int8"))
            weight = 1.0 + int(group.me[1:])
            return all_to_all_once(group, [message], weight).reduced

        results = together(build(3), member)
        assert len({result.digest for result in results}) == 1
        for result in results:
            assert list(result.packets) == ["w0", "w1", "w2"]
            assert result.weights == {"w0": 1.0, "w1": 2.0, "w2": 3.0}
            for sender, (packet,) in result.packets.items():
                expected = packet_of(mine(sender), "int8")
                assert (packet.codec, packet.sizes) == (expected.codec, expected.sizes)
                assert bytes(packet.data) == bytes(expected.data)

    @pytest.mark.parametrize("size", [0, 1, 77, BIG])
    def test_messages_reach_those_that_they_are_for_and_nobody_else(
        self, build: Build, size: int
    ) -> None:
        """Each member has two messages for the next one, of different sizes."""
        following = {"w0": "w1", "w1": "w2", "w2": "w0"}

        def member(group: Group) -> AllToAllResult:
            messages = [
                PeerMessage((following[group.me], "w9"), packet_of(mine(group.me, size))),
                PeerMessage((following[group.me],), packet_of(mine(group.me, 3, seed=1))),
            ]
            return all_to_all_once(group, messages).reduced

        results = together(build(3), member)
        assert len({result.digest for result in results}) == 1
        for me, result in zip(following, results, strict=True):
            (sender,) = [name for name, to in following.items() if to == me]
            assert list(result.packets) == [sender]
            big, small = result.packets[sender]
            assert torch.equal(vector_in(big), mine(sender, size))
            assert torch.equal(vector_in(small), mine(sender, 3, seed=1))
            assert result.contributors == ("w0", "w1", "w2")

    def test_what_a_member_gives_to_itself_it_gets(self, build: Build) -> None:
        def member(group: Group) -> AllToAllResult:
            return all_to_all_once(
                group, [PeerMessage((group.me,), packet_of(mine(group.me)))]
            ).reduced

        for slot, result in enumerate(together(build(2), member)):
            assert torch.equal(vector_in(result.packets[f"w{slot}"][0]), mine(f"w{slot}"))
            assert list(result.packets) == [f"w{slot}"]

    def test_nothing_for_nobody_is_agreed_on_too(self, build: Build) -> None:
        results = together(build(3), lambda group: all_to_all_once(group, [], weight=0.0))
        assert len({result.reduced.digest for result in results}) == 1
        for result in results:
            assert result.verdict.committed
            assert result.reduced.packets == {}
            assert result.reduced.weights == {"w0": 0.0, "w1": 0.0, "w2": 0.0}

    def test_what_others_gave_each_other_changes_the_digest(self, build: Build) -> None:
        def digest(value: float) -> str:
            def member(group: Group) -> str:
                messages = [PeerMessage(("w1",), packet_of(torch.full((5,), value)))]
                return all_to_all_once(group, messages if group.me == "w0" else []).reduced.digest

            return together(build(3), member)[2]

        assert digest(1.0) == digest(1.0)
        assert digest(1.0) != digest(2.0)

    def test_one_member_alone_gets_its_own_messages(self, build: Build) -> None:
        def member(group: Group) -> AllToAllResult:
            messages = [PeerMessage((group.me,), packet_of(mine(group.me)))]
            return all_to_all_once(group, messages, weight=2.0).reduced

        (result,) = together(build(1), member)
        assert torch.equal(vector_in(result.packets["w0"][0]), mine("w0"))
        assert result.weights == {"w0": 2.0}
        assert result.sent_bytes == result.received_bytes == 0

    def test_bytes_of_an_all_to_all_are_those_of_its_messages(
        self, build: Build, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Big ones, so that heads and tables weigh nothing; w0 gives one to both others."""
        monkeypatch.setattr(relay, "STALL_S", PATIENCE_S)  # else a busy machine sends more

        def member(group: Group) -> tuple[int, int, str]:
            to = {"w0": ("w1", "w2"), "w1": ("w0",), "w2": ("w2",)}[group.me]
            agreed = all_to_all_once(group, [PeerMessage(to, packet_of(mine(group.me, BIG)))])
            assert agreed.sent_bytes == agreed.reduced.sent_bytes
            return agreed.sent_bytes, agreed.received_bytes, agreed.plan.route

        one = 4 * BIG
        results = together(build(3), member)
        uploads = [2 if results[0][2] == "direct" else 1, 1, 0]
        for (sent, received, _), up, down in zip(results, uploads, [1, 1, 1], strict=True):
            assert sent == pytest.approx(up * one, rel=0.01, abs=1000)
            assert received == pytest.approx(down * one, rel=0.01, abs=1000)

    def test_two_reduces_in_one_round(self, build: Build) -> None:
        def member(group: Group) -> CommittedRound[Both]:
            def exchange(_: RoundPlan) -> Both:
                first = mean_once(group, mine(group.me))
                return Both(first, mean_once(group, first.tensors[0] + mine(group.me, seed=1)))

            return run_round(group, exchange, PeriodReport(0, "base"))

        results = together(build(3), member)
        assert len({result.reduced.digest for result in results}) == 1
        first, second = results[0].reduced.first, results[0].reduced.second
        assert isinstance(first, Reduced)
        assert isinstance(second, Reduced)
        members = ["w0", "w1", "w2"]
        mean = mean64([mine(m) for m in members], [1, 1, 1])
        torch.testing.assert_close(first.tensors[0].double(), mean)
        added = mean64([mine(m, seed=1) for m in members], [1, 1, 1])
        torch.testing.assert_close(second.tensors[0].double(), mean + added)
        assert results[0].sent_bytes == first.sent_bytes + second.sent_bytes

    def test_exchanges_begun_together_are_done_in_order(self, build: Build) -> None:
        def member(group: Group) -> CommittedRound[Both]:
            def exchange(_: RoundPlan) -> Both:
                codec = make_codec("fp32")
                sent = group.all_to_all([PeerMessage(("w0", "w1"), packet_of(mine(group.me)))])
                mean = group.reduce([mine(group.me, BIG)], codec=codec, weight=1.0)
                return Both(sent.wait(), mean.wait())

            return run_round(group, exchange, PeriodReport(0, "base"))

        results = together(build(2), member)
        assert len({result.reduced.digest for result in results}) == 1
        found, mean = results[1].reduced.first, results[1].reduced.second
        assert isinstance(found, AllToAllResult)
        assert isinstance(mean, Reduced)
        assert torch.equal(vector_in(found.packets["w0"][0]), mine("w0"))
        assert torch.equal(mean.tensors[0], (mine("w0", BIG) + mine("w1", BIG)) / 2)

    @pytest.mark.parametrize("lost_in", ["the first", "the second"])
    @pytest.mark.parametrize("all_to_all_first", [True, False])
    def test_survivors_agree_after_a_loss_in_any_exchange(
        self, build: Build, lost_in: str, all_to_all_first: bool
    ) -> None:
        world = build(3)

        def member(group: Group) -> CommittedRound[Both] | None:
            def give() -> AllToAllResult:
                return group.all_to_all(
                    [PeerMessage(("w0", "w1", "w2"), packet_of(mine(group.me)))]
                ).wait()

            def exchange(_: RoundPlan) -> Both:
                def step(first: bool) -> Reduced | AllToAllResult:
                    return give() if first == all_to_all_first else mean_once(group, mine(group.me))

                if group.me == "w1" and lost_in == "the first":
                    world.die(group)
                    raise GroupError("gone")
                first = step(True)
                if group.me == "w1":
                    world.die(group)
                    raise GroupError("gone")
                return Both(first, step(False))

            if group.me == "w1":
                exchange_plan = group.join(PeriodReport(0, "base"))
                with pytest.raises(GroupError):
                    exchange(exchange_plan)
                return None
            return run_round(group, exchange, PeriodReport(0, "base"))

        left = [result for result in together(world, member) if result is not None]
        assert len({result.reduced.digest for result in left}) == 1
        for result in left:
            assert result.verdict.committed
            assert result.reduced.contributors == ("w0", "w2")
            found = result.reduced.first if all_to_all_first else result.reduced.second
            assert isinstance(found, AllToAllResult)
            for sender, (packet,) in found.packets.items():
                assert torch.equal(vector_in(packet), mine(sender))

    def test_an_aborted_all_to_all_is_repeated_with_new_messages(self, build: Build) -> None:
        """The exchange is called anew with every plan, and may give something else."""

        def member(group: Group) -> tuple[CommittedRound[AllToAllResult], int]:
            attempts = 0

            def exchange(plan: RoundPlan) -> AllToAllResult:
                nonlocal attempts
                attempts += 1
                value = torch.full((7,), float(attempts))
                got = group.all_to_all([PeerMessage(tuple(plan.members), packet_of(value))]).wait()
                if group.me == "w1" and attempts == 1:
                    world_full = GroupError("the disk is full")
                    got = AllToAllResult({}, got.weights, 0, 0, world_full.what)
                return got

            return run_round(group, exchange, PeriodReport(0, "base")), attempts

        for result, attempts in together(build(2), member):
            assert attempts == result.attempts == 2
            for packets in result.reduced.packets.values():
                assert torch.equal(vector_in(packets[0]), torch.full((7,), 2.0))

    def test_a_codec_that_gathers_gives_the_mean_in_member_order(self, build: Build) -> None:
        codecs = {f"w{slot}": Gathered() for slot in range(3)}

        def member(group: Group) -> CommittedRound[Reduced]:
            xs = values(group.me, (2000,), (3, 5))
            if group.me == "w1":
                xs[0][7] = torch.nan

            def exchange(_: RoundPlan) -> Reduced:
                weight = 1.0 + int(group.me[1:])
                return group.reduce(xs, codec=codecs[group.me], weight=weight).wait()

            return run_round(group, exchange, PeriodReport(0, "base"))

        results = together(build(3), member)
        assert len({result.reduced.digest for result in results}) == 1
        a, c = values("w0", (2000,), (3, 5)), values("w2", (2000,), (3, 5))
        for result in results:
            assert result.reduced.contributors == ("w0", "w2")
            assert result.reduced.weight == 4.0
            for index in range(2):
                got = result.reduced.tensors[index]
                assert torch.equal(got, results[0].reduced.tensors[index])
                torch.testing.assert_close(got.double(), mean64([a[index], c[index]], [1, 3]))
        for member_, codec in codecs.items():
            assert codec.rounds == [0]
            assert codec.settled == [member_ != "w1"]

    def test_codecs_of_several_exchanges_settle_once_each(self, build: Build) -> None:
        def member(group: Group) -> list[list[bool]]:
            first, second = Gathered(), Gathered()

            def exchange(_: RoundPlan) -> Both:
                a = group.reduce([mine(group.me)], codec=first, weight=1.0).wait()
                b = group.reduce([mine(group.me)], codec=second, weight=1.0).wait()
                group.reduce([mine(group.me)], codec=first, weight=1.0).wait()
                return Both(a, b)

            run_round(group, exchange, PeriodReport(0, "base"))
            return [first.settled, second.settled]

        assert together(build(2), member) == [[[True], [True]], [[True], [True]]]

    def test_different_exchanges_are_an_error(self, build: Build) -> None:
        world: World = build(2, timeout_s=3.0)

        def member(group: Group) -> str:
            join_in_peace(group)
            try:
                if group.me == "w0":
                    group.all_to_all([PeerMessage(("w1",), packet_of(mine("w0")))]).wait()
                else:
                    mean_once(group, mine("w1"))
            except GroupError:
                group.commit(None, ok=False, reason="it failed")
                return "an error"
            return "a result"

        assert "an error" in [str(result) for result in world.run(member)]
