from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from atoll.codec.registry import make_codec
from atoll.errors import ConfigError, LeftBehind, PeerLost
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroup, MemoryGroups
from atoll.group.period import PeriodReport
from atoll.group.run_round import CommittedMean, CommittedRound, mean_exchange, run_round
from tests.contracts.all_to_all_suite import AllToAllSuite
from tests.contracts.group_suite import Build, GroupSuite, assert_same_everywhere, values
from tests.patience import PATIENCE_S

T = TypeVar("T")


class MemoryWorld:
    counts_header_bytes = False

    def __init__(self, n: int, timeout_s: float) -> None:
        self.groups = MemoryGroups(n, timeout_s=timeout_s)

    def run(self, function: Callable[[Group], T]) -> list[T | BaseException]:
        return self.groups.run(function)

    def die(self, group: Group) -> None:
        self.groups.kill(group.me)


class TestMemory(GroupSuite, AllToAllSuite):
    @pytest.fixture
    def build(self) -> Build:
        return lambda n, *, timeout_s=PATIENCE_S: MemoryWorld(n, timeout_s)


def round_of(group: Group) -> CommittedMean:
    return run_round(
        group,
        mean_exchange(group, values(group.me, (64,)), codec=make_codec("fp32"), weight=1.0),
        PeriodReport(0, "b"),
    )


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        ("join", ("w0", "w2")),
        ("send", ("w0", "w2")),
        ("sent", ("w0", "w1", "w2")),
        ("commit", ("w0", "w1", "w2")),
    ],
)
def test_member_killed_at_every_phase(phase: str, expected: tuple[str, ...]) -> None:
    groups = MemoryGroups(3, timeout_s=PATIENCE_S)
    groups.kill("w1", at=phase)
    first, killed, last = groups.run(round_of)
    assert isinstance(killed, PeerLost)
    assert isinstance(first, CommittedRound)
    assert isinstance(last, CommittedRound)
    assert_same_everywhere([first.reduced, last.reduced])
    assert first.reduced.contributors == expected


def test_sum_is_in_slot_order_however_members_are_named() -> None:
    results = MemoryGroups(3, ids=["w2", "w0", "w1"]).together(round_of)
    a, b, c = (values(f"w{slot}", (64,))[0] for slot in range(3))
    assert results[0].reduced.contributors == ("w0", "w1", "w2")
    assert torch.equal(results[0].reduced.tensors[0], ((a + b) + c) / 3)


def test_newcomer_takes_part_in_the_next_round() -> None:
    groups = MemoryGroups(2, timeout_s=PATIENCE_S)
    groups.together(round_of)
    groups.add()

    def second(group: Group) -> CommittedMean:
        return run_round(
            group,
            mean_exchange(group, [torch.ones(3)], codec=make_codec("fp32"), weight=1.0),
            PeriodReport(1, "b"),
        )

    assert groups.together(second)[2].reduced.contributors == ("w0", "w1", "w2")


def test_member_on_another_state_is_left_behind() -> None:
    def member(group: Group) -> CommittedMean:
        base = "other" if group.me == "w1" else "same"
        return run_round(
            group,
            mean_exchange(group, [torch.ones(3)], codec=make_codec("fp32"), weight=1.0),
            PeriodReport(0, base),
        )

    first, odd, last = MemoryGroups(3, timeout_s=PATIENCE_S).run(member)
    assert isinstance(odd, LeftBehind)
    assert isinstance(first, CommittedRound)
    assert isinstance(last, CommittedRound)
    assert first.reduced.contributors == ("w0", "w2")


def test_stop_is_told_with_the_next_plan() -> None:
    groups = MemoryGroups(2)
    groups.stop()
    groups.together(round_of)
    assert [group.stopping for group in groups] == [True, True]


def test_odd_codec_fails_its_member_and_not_the_others() -> None:
    def member(group: Group) -> CommittedMean:
        codec = "int8" if group.me == "w1" else "fp32"
        return run_round(
            group,
            mean_exchange(group, [torch.ones(9)], codec=make_codec(codec), weight=1.0),
            PeriodReport(0, "b"),
        )

    groups = MemoryGroups(3, timeout_s=PATIENCE_S)

    def leaving(group: Group) -> CommittedMean:
        try:
            return member(group)
        except Exception:
            group.close()
            raise

    first, odd, last = groups.run(leaving)
    assert "int8:256" in str(odd)
    assert isinstance(first, CommittedRound)
    assert isinstance(last, CommittedRound)
    assert first.reduced.contributors == ("w0", "w2")


def test_impossible_groups_are_refused() -> None:
    with pytest.raises(ConfigError):
        MemoryGroups(2, ids=["w0", "w0"])
    with pytest.raises(ConfigError):
        MemoryGroups(2).kill("w7")
    assert isinstance(MemoryGroups(1)[0], MemoryGroup)
