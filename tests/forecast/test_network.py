"""The model of rounds on lines: formulas at their limits, and monotone in everything."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.fleet.fleet import Path
from atoll.forecast.network import (
    FIRST_WINDOW_BYTES,
    GOODPUT,
    SUMS,
    Exchange,
    ask_s,
    direct_round_s,
    relay_round_s,
    transfer_s,
)
from tests.forecast.worlds import fleet

EXCHANGE = Exchange(relay_sent=1e6, relay_received=1e6, direct_sent=1.5e6, direct_received=1.5e6)
RATES = st.floats(1e4, 1e9)
TRIPS = st.floats(0.0, 0.5)


def test_without_delay_a_transfer_takes_bytes_by_rate() -> None:
    assert transfer_s(1e6, Path(1e6, 0.0)) == pytest.approx(1 / GOODPUT)


def test_few_bytes_take_half_a_round_trip() -> None:
    assert transfer_s(100, Path(1e9, 0.2)) == pytest.approx(0.1, abs=1e-3)


def test_after_a_pause_a_long_line_fills_slowly() -> None:
    path = Path(1e7, 0.1)
    nbytes = 7 * FIRST_WINDOW_BYTES  # three windows: 1 + 2 + 4
    slow, warm = transfer_s(nbytes, path), transfer_s(nbytes, path, pause_s=0.0)
    assert slow - warm == pytest.approx(0.2, abs=0.02)


def test_a_machine_without_a_line_never_ends() -> None:
    assert math.isinf(transfer_s(1, Path(0.0, 0.1)))


@given(nbytes=st.floats(1, 1e9), rate=RATES, trip=TRIPS, pause=st.floats(0, 100))
def test_transfers_are_monotone(nbytes: float, rate: float, trip: float, pause: float) -> None:
    one = transfer_s(nbytes, Path(rate, trip), pause_s=pause)
    assert transfer_s(nbytes, Path(2 * rate, trip), pause_s=0.0) <= one + 1e-9
    assert transfer_s(2 * nbytes, Path(rate, trip), pause_s=math.inf) >= one - 1e-9


def test_the_hubs_line_is_shared_by_all() -> None:
    wide = fleet(0.1, 0.1, 0.1, 0.1, up_mbps=1000, down_mbps=1000, latency_ms=0)
    narrow = dataclasses.replace(
        wide, hub=dataclasses.replace(wide.hub, up_mbps=100, down_mbps=100)
    )
    rounds = [relay_round_s(one, one.machines, EXCHANGE) for one in (wide, narrow)]
    assert rounds[1] == pytest.approx(2 * 1e6 * 4 * 8 / 100e6 / GOODPUT, rel=0.1)
    assert rounds[0] < rounds[1] / 2


@pytest.mark.parametrize(("up", "down"), [(10, 10), (10, 40), (40, 10)])
def test_a_mean_that_comes_down_early_takes_one_way(up: int, down: int) -> None:
    one = fleet(0.1, 0.1, 0.1, 0.1, up_mbps=up, down_mbps=down, latency_ms=0)
    whole = Exchange(relay_sent=1e7, relay_received=1e7, direct_sent=0.0, direct_received=0.0)
    both, early, late = (
        relay_round_s(one, one.machines, dataclasses.replace(whole, relay_last=last))
        for last in (math.inf, 3e5, 1e7)
    )
    slower_way_s = 8 * 1e7 / (min(up, down) * 1e6) / GOODPUT
    assert slower_way_s < early < 1.1 * slower_way_s < both
    assert both == late


def test_machines_apart_have_no_direct_round() -> None:
    apart = fleet(0.1, 0.1)
    apart = apart.with_machines(dataclasses.replace(m, site="") for m in apart.machines)
    assert math.isinf(direct_round_s(apart, apart.machines, EXCHANGE))


@pytest.mark.parametrize("collective", sorted(SUMS))
@pytest.mark.parametrize("members", [2, 3, 4, 6])
def test_sums_get_faster_with_every_line(collective: str, members: int) -> None:
    slow = fleet(*[0.1] * members)
    fast = fleet(*[0.1] * members, up_mbps=500.0, down_mbps=500.0)
    plain = dataclasses.replace(EXCHANGE, plain=True)
    times = [
        direct_round_s(one, one.machines, plain, collective=collective) for one in (slow, fast)
    ]
    assert 0 < times[1] < times[0] < math.inf


def test_a_tree_beats_a_ring_on_long_lines_with_few_bytes() -> None:
    far = fleet(*[0.1] * 8, latency_ms=100)
    few = dataclasses.replace(EXCHANGE, direct_sent=1000.0, direct_received=1000.0, plain=True)
    ring, tree = (
        direct_round_s(far, far.machines, few, collective=name) for name in ("ring", "tree")
    )
    # 6 hops instead of 14, besides what the hub decides.
    decided = ask_s(far, far.machines) + 0.1
    assert (tree - decided) / (ring - decided) == pytest.approx(6 / 14, rel=0.05)


def test_a_sender_with_bbr_does_not_start_slowly_after_a_pause() -> None:
    path = Path(1e7, 0.1)
    nbytes = 7 * FIRST_WINDOW_BYTES
    kept = dataclasses.replace(path, keeps_rate=True)
    assert transfer_s(nbytes, kept, pause_s=60.0) == transfer_s(nbytes, path, pause_s=0.0)
    assert transfer_s(nbytes, kept) == transfer_s(nbytes, path)  # a new connection knows nothing


def test_who_is_done_early_asks_the_hub_early() -> None:
    far = fleet(0.1, 0.1)
    a, b = far.machines
    far = far.with_machines([a, dataclasses.replace(b, latency_ms=200.0)])
    together, early = (ask_s(far, far.machines, lags) for lags in ((0.0, 0.0), (0.0, 0.15)))
    assert together - early == pytest.approx(0.15)
    assert together == pytest.approx(0.2, abs=0.02)


def test_members_near_the_hub_send_before_a_far_one_has_its_plan() -> None:
    near = fleet(0.1, 0.1, 0.1, up_mbps=1000, down_mbps=1000, latency_ms=10)
    a, b, c = near.machines
    far = near.with_machines([a, b, dataclasses.replace(c, latency_ms=200.0)])
    few = dataclasses.replace(EXCHANGE, direct_sent=10.0, direct_received=10.0)
    # To the hub and back; a plan there, twice to the others 105 ms away, a vote to the hub.
    assert direct_round_s(far, far.machines, few) == pytest.approx(
        0.2 + 0.1 + 2 * 0.105 + 0.1, abs=0.06
    )


@pytest.mark.parametrize("round_s", [relay_round_s, direct_round_s])
def test_who_joins_ahead_does_not_wait_for_its_way(round_s: Callable[..., float]) -> None:
    near, far = (fleet(0.1, 0.1, 0.1, latency_ms=ms) for ms in (1.0, 200.0))
    saved = [
        round_s(one, one.machines, EXCHANGE) - round_s(one, one.machines, EXCHANGE, ahead=True)
        for one in (near, far)
    ]
    assert saved[0] == pytest.approx(0.001, abs=1e-4)
    assert saved[1] == pytest.approx(0.2, rel=0.05)


def test_a_far_member_and_one_with_a_slow_line_do_not_add_up() -> None:
    plain = fleet(0.1, 0.1, up_mbps=10.0, down_mbps=10.0, latency_ms=0.0)
    apart = plain.changed("m0", latency_ms=200.0, up_mbps=1e4, down_mbps=1e4)
    both = plain.changed("m0", latency_ms=200.0)
    found = [
        relay_round_s(one, one.machines, EXCHANGE, ahead=True, pause_s=0.0)
        for one in (plain, apart, both)
    ]
    # Its bytes are there before those of the slow line.
    assert found[1] == pytest.approx(found[0], abs=0.05)
    assert found[2] > found[0] + 0.3
