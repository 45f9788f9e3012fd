"""When a machine pauses, and that it does not change its mind all the time."""

from __future__ import annotations

import datetime

import pytest

from atoll.node.availability.policy import OwnerPolicy
from atoll.node.availability.reading import Reading, combine_sensors
from atoll.node.availability.rule import BEGIN_S, END_S, Hysteresis, decide

NOON = datetime.datetime(2024, 1, 3, 12, 0)
ALL = OwnerPolicy(
    pause_on_battery=True, pause_on_metered=True, pause_when_active=10, quiet_hours=["12:00-13:00"]
)


@pytest.mark.parametrize(
    ("policy", "reading", "text"),
    [
        (OwnerPolicy(), Reading(on_battery=True, metered=True, idle_s=0.0), ""),
        (OwnerPolicy(), Reading(sleeping=True), "the machine goes to sleep"),
        (OwnerPolicy(pause_on_sleep=False), Reading(sleeping=True), ""),
        (OwnerPolicy(), Reading(lid_closed=True), "the lid is closed"),
        (OwnerPolicy(pause_on_lid_close=False), Reading(lid_closed=True), ""),
        (OwnerPolicy(pause_on_battery=True), Reading(on_battery=True), "on battery"),
        (OwnerPolicy(pause_on_battery=True), Reading(on_battery=False), ""),
        (OwnerPolicy(pause_on_battery=True), Reading(), ""),
        (
            OwnerPolicy(pause_on_battery=True, battery_percent=40),
            Reading(on_battery=True, battery_percent=41),
            "",
        ),
        (
            OwnerPolicy(pause_on_battery=True, battery_percent=40),
            Reading(on_battery=True, battery_percent=40),
            "on battery, at or below 40 %",
        ),
        (OwnerPolicy(pause_on_metered=True), Reading(metered=True), "on a metered network"),
        (
            OwnerPolicy(pause_when_active=10),
            Reading(idle_s=599),
            "the owner is active (idle for less than 10 minutes)",
        ),
        (OwnerPolicy(pause_when_active=10), Reading(idle_s=600), ""),
        (OwnerPolicy(quiet_hours=["11:00-13:30"]), Reading(), "quiet hours until 13:30"),
        (
            OwnerPolicy(quiet_hours=["11:00-13:30", "12:00-14:00"]),
            Reading(),
            "quiet hours until 14:00",
        ),
        (OwnerPolicy(quiet_hours=["13:00-14:00"]), Reading(), ""),
    ],
)
def test_each_reason_is_given_in_words(policy: OwnerPolicy, reading: Reading, text: str) -> None:
    assert decide(policy, reading, NOON).text == text


def test_a_reason_must_last_and_must_be_gone_for_a_while() -> None:
    policy, mind = OwnerPolicy(pause_on_battery=True), Hysteresis()

    def follow(on_battery: bool, monotonic: float) -> str:
        reading = Reading(on_battery=on_battery)
        return mind.follow(policy, reading, now=NOON, monotonic=monotonic).text

    assert follow(False, 0.0) == ""
    assert follow(True, 1.0) == ""
    assert follow(True, 1.0 + BEGIN_S - 0.1) == ""
    assert follow(True, 1.0 + BEGIN_S) == "on battery"
    assert follow(False, 20.0) == "on battery"
    assert follow(True, 21.0) == "on battery"  # the plug wiggles: the wait begins anew
    assert follow(False, 22.0) == "on battery"
    assert follow(False, 22.0 + END_S - 0.1) == "on battery"
    assert follow(False, 22.0 + END_S) == ""


def test_a_plug_pulled_for_a_moment_changes_nothing() -> None:
    policy, mind = OwnerPolicy(pause_on_battery=True), Hysteresis()
    said = [
        mind.follow(policy, Reading(on_battery=at % 3 == 2), now=NOON, monotonic=float(at)).text
        for at in range(60)
    ]
    assert set(said) == {""}


def test_machine_started_on_battery_takes_no_work() -> None:
    mind = Hysteresis()
    pause = mind.follow(
        OwnerPolicy(pause_on_battery=True), Reading(on_battery=True), now=NOON, monotonic=0.0
    )
    assert pause.cause == "battery"


def test_sleep_begins_and_ends_at_once() -> None:
    mind, policy = Hysteresis(), OwnerPolicy()
    mind.follow(policy, Reading(), now=NOON, monotonic=0.0)
    assert mind.follow(policy, Reading(sleeping=True), now=NOON, monotonic=1.0).cause == "sleep"
    assert mind.follow(policy, Reading(), now=NOON, monotonic=1.1).cause == ""


def test_low_battery_must_recharge_before_work_continues() -> None:
    policy = OwnerPolicy(pause_on_battery=True, battery_percent=40)
    low = decide(policy, Reading(on_battery=True, battery_percent=39), NOON)
    still = decide(policy, Reading(on_battery=True, battery_percent=44), NOON, before=low)
    assert still.text == low.text  # the words do not change with each percent
    assert not decide(policy, Reading(on_battery=True, battery_percent=46), NOON, before=low).text
    assert not decide(policy, Reading(on_battery=False, battery_percent=39), NOON, before=low).text


def test_the_reason_that_holds_is_replaced_at_once_by_another() -> None:
    mind = Hysteresis()
    mind.follow(ALL, Reading(on_battery=True), now=NOON, monotonic=0.0)
    assert mind.follow(ALL, Reading(metered=True), now=NOON, monotonic=1.0).cause == "metered"


def test_readings_are_put_together_and_the_unknown_stays_unknown() -> None:
    both = combine_sensors([Reading(on_battery=True, idle_s=3.0), Reading(idle_s=1.0)])
    assert both == Reading(on_battery=True, idle_s=1.0)
