from __future__ import annotations

import random

import pytest

from atoll.netlab.packets import HEADER, MAC_PREFIX, on_the_wire, receivers
from atoll.netlab.shape import Between, Shape
from atoll.netlab.switch import HostStats, Switch

HEADERS = 54  # Ethernet, IPv4, TCP


def packet(to: int, *, frame_bytes: int = 1250, segment_bytes: int = 0) -> bytes:
    virtio = HEADER.pack(0, 1 if segment_bytes else 0, HEADERS, segment_bytes, 0, 0)
    return virtio + (MAC_PREFIX + bytes([to])).ljust(frame_bytes, b"\0")


def arrivals(switch: Switch, *, until: float = 1e9) -> list[tuple[float, int]]:
    """Return when each packet arrives and at which host."""
    found = []
    while (due := switch.next_due()) is not None and due <= until:
        found += [(due, host) for host, _ in switch.deliveries(due)]
    return found


def stats(switch: Switch, host: int) -> HostStats:
    return HostStats(**switch.stats()[host])


def test_without_limits_a_packet_arrives_at_once() -> None:
    switch = Switch([Shape(), Shape()])
    switch.arrive(0, packet(1), 5.0)
    assert arrivals(switch) == [(5.0, 1)]


def test_a_round_trip_takes_the_mean_of_both_ends() -> None:
    switch = Switch([Shape(rtt_s=0.06), Shape(rtt_s=0.02)])
    switch.arrive(0, packet(1), 0.0)
    ((there, _),) = arrivals(switch)
    switch.arrive(1, packet(0), there)
    ((back, _),) = arrivals(switch)
    assert (there, back) == pytest.approx((0.03, 0.04))


def test_rate_is_the_slower_of_upload_and_download() -> None:
    for up_bps, down_bps in ((1e6, 0.0), (0.0, 1e6), (1e6, 1e6), (1e6, 9e6), (9e6, 1e6)):
        switch = Switch([Shape(up_bps=up_bps, queue_s=9), Shape(down_bps=down_bps, queue_s=9)])
        for _ in range(100):
            switch.arrive(0, packet(1, frame_bytes=1250), 0.0)  # 10 ms at 1 Mbit/s
        times = [time for time, _ in arrivals(switch)]
        assert len(times) == 100
        assert times[-1] - times[0] == pytest.approx(0.99)


def test_hosts_of_one_network_do_not_use_their_links() -> None:
    switch = Switch([Shape(up_bps=1e6, rtt_s=0.2), Shape(down_bps=1e6, rtt_s=0.2), Shape()])
    switch.set_between(0, 1, Between(bps=10e6, rtt_s=0.02, inside=True))
    for _ in range(100):
        switch.arrive(0, packet(1), 0.0)  # 1 ms each at 10 Mbit/s
    times = [time for time, _ in arrivals(switch)]
    assert (times[0], times[-1]) == pytest.approx((0.012, 0.111))
    switch.arrive(0, packet(2), 1.0)  # the link to elsewhere was idle
    ((arrived, host),) = arrivals(switch)
    assert host == 2
    assert arrived == pytest.approx(1.11)


def test_a_slow_way_between_two_hosts_slows_no_other() -> None:
    switch = Switch([Shape(up_bps=10e6), Shape(), Shape()])
    switch.set_between(0, 1, Between(bps=1e6, rtt_s=0.04))
    for _ in range(5):
        switch.arrive(0, packet(1), 0.0)
    switch.arrive(0, packet(2), 0.0)
    arrived, hosts = zip(*arrivals(switch), strict=True)
    assert hosts == (2, 1, 1, 1, 1, 1)
    assert arrived == pytest.approx((0.006, 0.031, 0.041, 0.051, 0.061, 0.071))


def test_hosts_apart_reach_only_the_others() -> None:
    switch = Switch([Shape(), Shape(), Shape()])
    switch.set_between(0, 1, Between(apart=True))
    switch.arrive(0, packet(1), 0.0)
    switch.arrive(0, packet(2), 0.0)
    assert arrivals(switch) == [(0.0, 2)]


def test_two_senders_share_the_download_of_their_receiver() -> None:
    switch = Switch([Shape(), Shape(), Shape(down_bps=1e6, queue_s=9)])
    for _ in range(50):
        switch.arrive(0, packet(2), 0.0)
        switch.arrive(1, packet(2), 0.0)
    assert arrivals(switch)[-1][0] == pytest.approx(1.0)


def test_a_full_queue_drops_what_comes_later() -> None:
    switch = Switch([Shape(up_bps=1e6, queue_s=0.1), Shape()])
    for _ in range(100):
        switch.arrive(0, packet(1), 0.0)
    passed = len(arrivals(switch))
    assert passed == 11  # ten wait, 10 ms each, behind the one on the line
    assert stats(switch, 0).dropped_packets == 89
    switch.arrive(0, packet(1), 10.0)
    assert len(arrivals(switch)) == 1


def test_jitter_moves_packets_but_never_past_each_other() -> None:
    switch = Switch([Shape(rtt_s=0.1, jitter_s=0.08), Shape()], random=random.Random(3))
    for index in range(200):
        switch.arrive(0, packet(1), index * 0.001)
    times = [time for time, _ in arrivals(switch)]
    assert times == sorted(times)
    delays = [time - index * 0.001 for index, time in enumerate(times)]
    assert min(delays) >= 0.01
    assert 0.03 < max(delays) <= 0.0901


def test_the_share_of_lost_packets_is_what_was_asked() -> None:
    switch = Switch([Shape(loss=0.1), Shape(loss=0.1)], random=random.Random(1))
    for _ in range(20_000):
        switch.arrive(0, packet(1), 0.0)
    arrived = len(arrivals(switch))
    assert 0.89 < arrived / 20_000 < 0.91
    lost = stats(switch, 0).lost_packets + stats(switch, 1).lost_packets
    assert arrived + lost == 20_000


def test_cut_host_loses_packets_in_flight() -> None:
    switch = Switch([Shape(rtt_s=1.0), Shape()])
    switch.arrive(0, packet(1), 0.0)
    switch.set_cut(1, cut=True)
    switch.arrive(1, packet(0), 0.0)
    assert arrivals(switch) == []
    assert stats(switch, 1).cut_packets == 2
    switch.set_cut(1, cut=False)
    switch.arrive(0, packet(1), 2.0)
    assert arrivals(switch) == [(2.5, 1)]


def test_a_new_shape_holds_for_the_packets_that_come_after_it() -> None:
    switch = Switch([Shape(rtt_s=0.2), Shape()])
    switch.arrive(0, packet(1), 0.0)
    switch.set_shape(0, Shape(rtt_s=2.0))
    switch.arrive(0, packet(1), 0.0)
    assert [time for time, _ in arrivals(switch)] == pytest.approx([0.1, 1.0])


def test_totals_count_segments_and_headers_as_a_wire_would() -> None:
    switch = Switch([Shape(), Shape()])
    big = packet(1, frame_bytes=HEADERS + 3000, segment_bytes=1448)
    switch.arrive(0, big, 0.0)
    arrivals(switch)
    assert on_the_wire(big) == (3000 + 3 * HEADERS, 3)
    assert (stats(switch, 0).sent_bytes, stats(switch, 0).sent_packets) == on_the_wire(big)
    assert (stats(switch, 1).received_bytes, stats(switch, 1).received_packets) == on_the_wire(big)


def test_broadcasts_reach_all_others_and_strangers_nobody() -> None:
    everybody = HEADER.pack(0, 0, 0, 0, 0, 0) + b"\xff" * 6 + bytes(50)
    assert receivers(everybody, sender=1, hosts=3) == [0, 2]
    assert receivers(packet(2), sender=1, hosts=3) == [2]
    assert receivers(packet(1), sender=1, hosts=3) == []
    assert receivers(packet(7), sender=1, hosts=3) == []
    assert receivers(HEADER.pack(0, 0, 0, 0, 0, 0) + b"\x02", sender=0, hosts=3) == []
