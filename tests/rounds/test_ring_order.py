"""The order of members on a ring, from measured lines."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest

from atoll.fleet.fleet import Fleet, Link, Machine
from atoll.forecast.network import Exchange, direct_round_s
from atoll.rounds.ring_order import EXACT, MeasuredLines, ring_order
from atoll.wire.round_messages import Line

NEAR, FAR = (0.001, 1e8), (0.1, 1e7)


def names(n: int) -> list[str]:
    return [f"w{slot}" for slot in range(n)]


def two_sites(n: int) -> dict[tuple[str, str], Line]:
    """Members with even and with odd numbers are near each other."""
    return {
        (a, b): NEAR if (int(a[1:]) - int(b[1:])) % 2 == 0 else FAR
        for a, b in itertools.permutations(names(n), 2)
    }


def far_hops(order: Sequence[str], lines: dict[tuple[str, str], Line]) -> int:
    return sum(lines[a, b] == FAR for a, b in zip(order, (*order[1:], order[0]), strict=True))


@pytest.mark.parametrize("n", [4, 5, EXACT, EXACT + 1, 16, 30])
def test_a_ring_passes_from_site_to_site_only_twice(n: int) -> None:
    order = ring_order(names(n), two_sites(n))
    assert sorted(order) == sorted(names(n))
    assert far_hops(order, two_sites(n)) == 2
    assert far_hops(names(n), two_sites(n)) > 2


def test_one_bad_line_is_avoided_in_its_direction() -> None:
    lines = dict.fromkeys(itertools.permutations(names(5), 2), NEAR)
    lines["w1", "w2"] = (0.05, 1e5)
    order = ring_order(names(5), lines)
    assert ("w1", "w2") not in list(zip(order, (*order[1:], order[0]), strict=True))


def test_noise_and_few_members_leave_the_order_alone() -> None:
    draw = random.Random(0)
    noisy = {
        pair: (0.03 * draw.uniform(0.97, 1.03), 1e7 * draw.uniform(0.97, 1.03))
        for pair in itertools.permutations(names(6), 2)
    }
    assert ring_order(names(6), noisy) == []
    assert ring_order(names(3), two_sites(3)) == []
    assert ring_order(names(6), {}) == []


def test_members_at_one_place_stay_in_order_on_busy_machines() -> None:
    draw = random.Random(0)
    busy = {
        pair: (draw.uniform(1e-4, 0.01), 10 ** draw.uniform(6, 9))
        for pair in itertools.permutations(names(6), 2)
    }
    assert ring_order(names(6), busy) == []


def test_a_member_without_measurements_has_a_place() -> None:
    known = {pair: line for pair, line in two_sites(7).items() if "w6" not in pair}
    order = ring_order(names(7), known)
    assert sorted(order) == names(7)
    assert far_hops([m for m in order if m != "w6"], two_sites(7)) == 2


def test_the_order_follows_members_and_new_measurements() -> None:
    measured = MeasuredLines()
    for member in names(6):
        found = {a: line for (a, b), line in two_sites(6).items() if b == member}
        measured.learn(member, found, among=names(6))
    assert sorted(measured.ring(names(6))) == names(6)
    assert sorted(measured.ring(names(5))) == names(5)
    for member in names(6):
        measured.learn(member, dict.fromkeys(set(names(6)) - {member}, NEAR), among=names(6))
    assert measured.ring(names(6)) == []


def test_a_member_tells_of_lines_from_other_members_only() -> None:
    measured = MeasuredLines()
    measured.learn("w0", {"w1": NEAR, "w0": NEAR, "nobody": NEAR}, among=names(2))
    for number in range(100):
        measured.learn("w0", {f"x{number}": NEAR}, among=names(2))
    assert measured.lines == {("w1", "w0"): NEAR}


SLOW = (0.02, 1e6)
WORLDS: dict[str, tuple[Callable[[str, str], Line], float]] = {
    "two cities": (lambda a, b: NEAR if (slot(a) - slot(b)) % 2 == 0 else (0.1, 1e8), 0.8),
    "slow neighbours": (lambda a, b: SLOW if (slot(a) - slot(b)) % 6 in (1, 5) else NEAR, 0.1),
}
"""The line from one member to another, and which share of the time the order has to take."""


def slot(member: str) -> int:
    return int(member[1:])


@pytest.mark.parametrize("world", WORLDS)
def test_in_a_simulated_network_the_order_takes_less_time(world: str) -> None:
    line, share = WORLDS[world]
    lines = {(a, b): line(a, b) for a, b in itertools.permutations(names(6), 2)}
    fleet = Fleet(
        machines=tuple(Machine(name=name, up_mbps=1e4, down_mbps=1e4) for name in names(6)),
        links=tuple(
            Link(between=[a, b], mbps=8 * rate / 1e6, latency_ms=1000 * trip_s)
            for (a, b), (trip_s, rate) in lines.items()
        ),
    )
    exchange = Exchange(
        relay_sent=4e7, relay_received=4e7, direct_sent=6.7e7, direct_received=6.7e7, plain=True
    )

    def seconds(order: Sequence[str]) -> float:
        return direct_round_s(fleet, fleet.of(order), exchange, pause_s=0.0)

    found = seconds(ring_order(names(6), lines))
    assert found < share * seconds(names(6))
    every = [seconds(["w0", *rest]) for rest in itertools.permutations(names(6)[1:])]
    assert found <= 1.01 * min(every)
