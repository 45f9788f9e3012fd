from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from atoll.swarm.routing import BOTH, MAX_BAN_S, StageRouter
from atoll.wire.swarm import Holder, SwarmPeer


def peers(*names: str, epoch: int = 1) -> list[SwarmPeer]:
    return [SwarmPeer(name, epoch, 1) for name in names]


def router(*names: str) -> StageRouter:
    made = StageRouter(Random(0))
    made.update(peers(*names))
    return made


def chosen(router: StageRouter, times: int, *, now: float = 0.0) -> Counter[str]:
    found = [router.choose(4, now) for _ in range(times)]
    return Counter(holder.member for holder in found if holder is not None)


def measure(router: StageRouter, row_s: dict[str, float]) -> None:
    for name, seconds in row_s.items():
        router.measured(Holder(name, 1), 4, seconds * 4 * BOTH, work=BOTH)


def test_speeds_of_one_to_three_share_a_quarter_to_three() -> None:
    made = router("slow", "fast")
    measure(made, {"slow": 0.3, "fast": 0.1})
    counts = chosen(made, 1000)
    assert counts["slow"] == pytest.approx(250, abs=10)
    assert counts["fast"] == pytest.approx(750, abs=10)


def test_shares_are_interleaved_not_in_blocks() -> None:
    made = router("slow", "fast")
    measure(made, {"slow": 0.3, "fast": 0.1})
    order = [made.choose(4, 0.0) for _ in range(400)]
    for start in range(0, 400, 40):
        part = Counter(holder.member for holder in order[start : start + 40] if holder)
        assert 8 <= part["slow"] <= 12


def test_unmeasured_members_share_evenly() -> None:
    assert max(chosen(router("a", "b", "c"), 300).values()) <= 101


def test_a_newcomer_starts_at_the_present_least() -> None:
    made = router("a", "b")
    chosen(made, 1000)
    made.update(peers("a", "b", "c"))
    assert chosen(made, 30)["c"] == pytest.approx(10, abs=2)


def test_a_change_of_speed_changes_the_shares() -> None:
    made = router("a", "b")
    measure(made, {"a": 0.1, "b": 0.1})
    for _ in range(100):
        measure(made, {"a": 0.3, "b": 0.1})
    chosen(made, 100)
    assert chosen(made, 400)["a"] == pytest.approx(100, abs=5)


def test_one_odd_measurement_moves_the_mean_by_a_tenth() -> None:
    made = router("a")
    measure(made, {"a": 0.1})
    measure(made, {"a": 1.1})
    assert made.row_s(Holder("a", 1)) == pytest.approx(0.2)


def test_a_banned_member_gets_nothing_until_it_announces_itself() -> None:
    made = router("a", "b")
    made.ban(Holder("a", 1), now=0.0)
    assert chosen(made, 10) == {"b": 10}
    made.update([*peers("a", epoch=2), *peers("b")])
    counts = chosen(made, 20)
    assert counts["a"] == pytest.approx(10, abs=2)


def test_a_ban_ends_by_itself_and_doubles_with_every_error() -> None:
    made = router("a")
    for wait in (2.0, 4.0, 8.0):
        made.ban(Holder("a", 1), now=0.0)
        assert made.choose(1, wait - 0.1) is None
        assert made.choose(1, wait) is not None
    for _ in range(9):
        made.ban(Holder("a", 1), now=0.0)
    assert made.choose(1, MAX_BAN_S) is not None


def test_after_a_ban_a_member_does_not_catch_up() -> None:
    made = router("a", "b")
    made.ban(Holder("a", 1), now=0.0)
    chosen(made, 100, now=1.0)
    assert chosen(made, 20, now=2.0)["a"] <= 12


def test_avoided_members_are_only_passed_over() -> None:
    made = router("a", "b")
    for _ in range(5):
        assert made.choose(1, 0.0, avoid={Holder("a", 1)}) == Holder("b", 1)
    assert made.choose(1, 0.0) == Holder("a", 1)
    assert made.choose(1, 0.0, avoid={Holder("a", 1), Holder("b", 1)}) is None


def test_members_that_left_the_table_are_forgotten() -> None:
    made = router("a", "b")
    made.update(peers("b"))
    assert Holder("a", 1) not in made
    assert chosen(made, 5) == {"b": 5}
    made.measured(Holder("a", 1), 4, 1.0, work=1.0)
    made.ban(Holder("a", 1), 0.0)


def test_ban_of_a_member_that_always_fails_stays_bounded() -> None:
    routes, holder = router("a"), Holder("a", 1)
    assert [routes.ban(holder, 0.0) for _ in range(1_100)][-1] == MAX_BAN_S
