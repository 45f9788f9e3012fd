"""Alarms about machines: links, disks, memory, clocks, versions, and machines that are lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.hub.alarms.collect import LinkHistory
from atoll.hub.alarms.facts import Facts, Forecast, HubFacts, NodeFacts
from atoll.hub.alarms.machine_rules import duration, size
from atoll.hub.alarms.series import LEAST_SPAN_S, Trend
from atoll.hub.sessions.handshake import WINDOW_S, ClockOffset
from tests.hub.alarms.stage import START, play, rule

HUB = HubFacts(version="1.0")
GB = 1e9


def trouble(**changes: Any) -> Callable[[float], Facts]:
    """Return the facts of two machines; one is in trouble from 60 s to 300 s."""

    def at(now: float) -> Facts:
        wrong = 60 <= now - START < 300
        well: dict[str, Any] = {"version": "1.0", "torch": "2.6", "jobs": ["j1"]}
        nodes = [
            NodeFacts(node="lap0", **well),
            NodeFacts(node="lap1", **(well | (changes if wrong else {}))),
        ]
        return Facts(now=now, nodes=nodes, hub=HUB)

    return at


LOW = Forecast(free_bytes=2 * GB, total_bytes=100 * GB)
FILLING = Forecast(free_bytes=30 * GB, total_bytes=100 * GB, full_in_s=1_800)


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("flapping-link", {"reconnects": 5}, "broke 5 times in 10 minutes"),
        ("disk-filling", {"disk": LOW}, "the disk of lap1 has 2.0 GB left (2%)"),
        ("disk-filling", {"disk": FILLING}, "is full in 30 minutes at this rate"),
        ("memory-filling", {"memory": LOW}, "the memory of lap1 has 2.0 GB left"),
        ("clock-skew", {"skew_s": -7.4}, "the clock of lap1 is 7 s behind the hub's"),
        ("clock-skew", {"skew_s": 90.0}, "the clock of lap1 is 90 s ahead of the hub's"),
        ("version-mismatch", {"version": "0.9"}, "lap1 runs Atoll 0.9, the hub 1.0"),
        ("version-mismatch", {"torch": "2.5"}, "trains j1 with torch 2."),
        ("node-lost", {"online": False, "gone_s": 25.0, "ran": 2}, "it ran 2 processes"),
    ],
)
def test_machine_in_trouble_is_named_and_the_alarm_ends(
    kind: str, changes: dict[str, Any], words: str
) -> None:
    played = play(kind, trouble(**changes), seconds=600)
    finding = played.only().finding
    assert words in finding.cause
    assert finding.node == ("lap1" if changes.get("torch") != "2.5" else finding.node)
    assert finding.remedy
    assert played.only().since == pytest.approx(START + 60, abs=3)
    (ended,) = played.ended
    assert ended.ended == pytest.approx(START + 300 + rule(kind).gone_s, abs=4)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("flapping-link", {"reconnects": 3}),
        ("disk-filling", {"disk": Forecast(free_bytes=9 * GB, total_bytes=100 * GB)}),
        ("disk-filling", {"disk": Forecast(free_bytes=5 * GB, full_in_s=7_200)}),
        ("disk-filling", {"disk": LOW, "online": False}),
        ("memory-filling", {"memory": Forecast(free_bytes=3 * GB, total_bytes=8 * GB)}),
        ("clock-skew", {"skew_s": 3.0}),
        ("clock-skew", {"skew_s": None}),
        ("version-mismatch", {"torch": "2.6+cpu"}),
        ("version-mismatch", {"torch": "2.5", "jobs": ["j2"]}),
        ("node-lost", {"online": False, "gone_s": 5.0}),
        ("node-lost", {"online": False, "gone_s": 60.0, "draining": True}),
        ("node-lost", {"online": False, "gone_s": 90_000.0}),
    ],
)
def test_what_is_within_bounds_is_nothing_to_tell_about(kind: str, changes: dict[str, Any]) -> None:
    assert not play(kind, trouble(**changes), seconds=600).opened


def test_trouble_that_passes_at_once_is_not_told() -> None:
    def at(now: float) -> Facts:
        blip = int(now - START) % 60 < 10
        node = NodeFacts(node="lap1", version="1.0", skew_s=30.0 if blip else 0.0, memory=LOW)
        calm = NodeFacts(node="lap1", version="1.0", skew_s=0.0)
        return Facts(now=now, nodes=[node if blip else calm], hub=HUB)

    assert not play("clock-skew", at, seconds=600).opened
    assert not play("memory-filling", at, seconds=600).opened


def test_the_hubs_own_disk_is_watched_too() -> None:
    full = HubFacts(version="1.0", disk=Forecast(free_bytes=1e8, total_bytes=100 * GB))
    (found,) = rule("disk-filling").find(Facts(now=START, hub=full))
    assert (found.node, found.severity) == ("hub", "critical")
    assert "the hub's disk has 100.0 MB left" in found.cause


# ---------------------------------------------------------------------------------- forecasts


@given(
    rate=st.floats(1e5, 5e7), noise=st.floats(0.0, 0.2), span_s=st.floats(400, 5_000),
    start=st.floats(1e9, 1e12),
)  # fmt: skip
def test_what_shrinks_steadily_is_foreseen(
    rate: float, noise: float, span_s: float, start: float
) -> None:
    trend, now = Trend(), 0.0
    while now <= span_s:
        wobble = rate * 8 * noise * (1 if int(now / 8) % 2 else -1)
        trend.add(now, max(0.0, start - rate * now + wobble))
        now += 8.0
    expected = max(0.0, start - rate * span_s) / rate
    found = trend.full_in_s()
    if start > rate * span_s * 1.05:
        assert found == pytest.approx(expected, rel=0.15, abs=40)


@given(st.lists(st.floats(1e9, 1.02e9), min_size=50, max_size=200), st.booleans())
def test_what_only_wobbles_or_grows_is_not_foreseen(values: list[float], grows: bool) -> None:
    trend = Trend()
    for number, value in enumerate(values):
        trend.add(number * 8.0, value + (number * 1e7 if grows else 0.0))
    found = trend.full_in_s()
    assert found is None or (not grows and found > 3_600)


def test_a_minute_says_nothing_about_an_hour() -> None:
    trend = Trend()
    for number in range(8):
        trend.add(number * 8.0, 1e9 - number * 1e8)
    assert trend.full_in_s() is None
    assert LEAST_SPAN_S > 64


def test_absurd_figures_of_a_node_are_not_foreseen() -> None:
    trend = Trend()
    for number in range(100):
        trend.add(number * 8.0, 1e200 * (1.0 - number / 200))
    assert trend.full_in_s() is None


# -------------------------------------------------------------------------------------- clocks


@given(skew_s=st.floats(-1e5, 1e5), delays=st.lists(st.floats(0.02, 4.0), min_size=3, max_size=80))
def test_skew_is_found_through_delays_of_messages(skew_s: float, delays: list[float]) -> None:
    offset, wall_minus_monotonic = ClockOffset(), 1.7e9
    for number, delay_s in enumerate([*delays, 0.02]):
        received = 100.0 + 2.0 * number
        sent = received - delay_s + wall_minus_monotonic + skew_s
        offset.note(sent, received)
    found = offset.skew_s(wall=received + wall_minus_monotonic, monotonic=received, latency_s=0.02)
    assert found == pytest.approx(skew_s, abs=0.01)


def test_clock_that_was_set_right_is_believed_after_two_windows() -> None:
    offset = ClockOffset()
    now = 0.0
    while now < 4 * WINDOW_S:
        wrong = 50.0 if now < WINDOW_S else 0.0
        offset.note(1e9 + now + wrong, now)
        now += 2.0
    assert offset.skew_s(wall=1e9 + now, monotonic=now) == pytest.approx(0.0, abs=0.1)


def test_times_that_cannot_be_are_not_believed() -> None:
    offset = ClockOffset()
    for theirs in (0.0, -5.0, float("nan"), float("inf")):
        offset.note(theirs, 10.0)
    assert offset.skew_s(wall=1.0, monotonic=1.0) is None


# --------------------------------------------------------------------------------------- links


def test_only_the_same_process_comes_back_and_only_lately() -> None:
    links = LinkHistory()
    for now in range(5):
        links.opened("lap1", "i1", float(now))
    links.opened("lap1", "i2", 6.0)
    assert links.count("lap1", 10.0) == 4, "a new process is no lost link"
    assert links.count("lap1", 602.5) == 2
    assert links.count("lap1", 700.0) == 0
    links.opened("lap1", "i2", 800.0)
    links.forget(lambda address: address == "lap1")
    assert links.count("lap1", 801.0) == 0


def test_words_for_sizes_and_times() -> None:
    assert [size(n) for n in (5e3, 2e6, 3.5e9, 1e12)] == ["5 kB", "2.0 MB", "3.5 GB", "1.0 TB"]
    assert [duration(s) for s in (5, 600, 10_000)] == ["5 s", "10 min", "2.8 h"]
