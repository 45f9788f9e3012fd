"""Sensors read real files in a tree made for the test, and real programs in a folder of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atoll.clock import VirtualClock
from atoll.node.availability import sensors
from atoll.node.availability.policy import OwnerPolicy
from atoll.node.availability.reading import Reading
from atoll.node.availability.sensors import (
    ABSENT_S,
    SLOW_S,
    SUPPLIES,
    Activity,
    Battery,
    Commands,
    Lid,
    Metered,
    Sensors,
)
from tests.patience import PATIENCE_S


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program has time to answer on a busy machine."""
    monkeypatch.setattr(sensors, "TIMEOUT_S", PATIENCE_S)


def supply(root: Path, name: str, **values: str) -> None:
    """Write one power supply as the kernel shows it."""
    folder = root / SUPPLIES / name
    folder.mkdir(parents=True, exist_ok=True)
    for key, value in values.items():
        (folder / key).write_text(value + "\n")


def program(folder: Path, name: str, *lines: str) -> Commands:
    """Write a program that prints lines and counts its calls; return what finds only it."""
    folder.mkdir(exist_ok=True)
    text = "\n".join(["#!/bin/sh", f'echo "$@" >> {folder}/{name}.calls', *lines])
    (folder / name).write_text(text + "\n")
    (folder / name).chmod(0o755)
    return Commands(str(folder))


NOTHING = Commands("/nonexistent")


def test_battery_follows_its_files(tmp_path: Path) -> None:
    battery = Battery(tmp_path)
    supply(tmp_path, "AC", type="Mains", online="1")
    assert battery.read() == Reading()  # a desktop
    supply(tmp_path, "BAT0", type="Battery", status="Charging", capacity="80")
    supply(tmp_path, "BAT1", type="Battery", status="Full", capacity="100")
    supply(tmp_path, "mouse", type="Battery", scope="Device", status="Discharging", capacity="5")
    assert battery.read() == Reading(on_battery=False, battery_percent=90.0)
    supply(tmp_path, "AC", type="Mains", online="0")
    supply(tmp_path, "BAT0", type="Battery", status="Discharging", capacity="80")
    assert battery.read() == Reading(on_battery=True, battery_percent=90.0)


def test_battery_without_readable_files_is_no_battery(tmp_path: Path) -> None:
    supply(tmp_path, "BAT0", type="Battery", status="Discharging", capacity="many")
    assert Battery(tmp_path).read() == Reading()


def test_metered_network_as_the_network_manager_says_it(tmp_path: Path) -> None:
    for value, expected in (("1", True), ("3", True), ("2", False), ("4", False), ("0", None)):
        commands = program(tmp_path, "busctl", f"echo 'u {value}'")
        assert Metered(commands).read() == Reading(metered=expected)


def test_metered_network_is_read_by_a_fallback_program(tmp_path: Path) -> None:
    program(tmp_path, "busctl", "exit 1")
    commands = program(tmp_path, "nmcli", "echo 'GENERAL.METERED:no'")
    assert Metered(commands).read() == Reading(metered=False)
    commands = program(
        tmp_path, "nmcli", "echo 'GENERAL.METERED:unknown'", "echo 'GENERAL.METERED:yes (guessed)'"
    )
    assert Metered(commands).read() == Reading(metered=True)
    assert Metered(NOTHING).read() == Reading()


def test_lid_by_its_file_and_a_dock_beside_it(tmp_path: Path) -> None:
    state = tmp_path / "proc/acpi/button/lid/LID0/state"
    state.parent.mkdir(parents=True)
    state.write_text("state:      open\n")
    assert Lid(root=tmp_path, commands=NOTHING).read() == Reading(lid_closed=False)
    state.write_text("state:      closed\n")
    assert Lid(root=tmp_path, commands=NOTHING).read() == Reading(lid_closed=True)
    docked = program(tmp_path / "bin", "busctl", "echo 'b true'")
    assert Lid(root=tmp_path, commands=docked).read() == Reading(lid_closed=False)


def test_lid_by_the_login_manager_where_there_is_no_file(tmp_path: Path) -> None:
    commands = program(
        tmp_path, "busctl", 'case "$*" in *LidClosed) echo "b true";; *) echo "b false";; esac'
    )
    assert Lid(root=tmp_path, commands=commands).read() == Reading(lid_closed=True)
    assert Lid(root=tmp_path, commands=NOTHING).read() == Reading()


def test_idle_time_by_terminals_and_input_devices(tmp_path: Path) -> None:
    clock = VirtualClock(10_000.0)
    activity = Activity(root=tmp_path, commands=NOTHING, clock=clock)
    assert activity.read() == Reading()
    for name, at in (("dev/pts/0", 9_000), ("dev/input/event3", 9_700)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (at, at))
    assert activity.read() == Reading(idle_s=300.0)


def test_idle_time_by_the_screen_before_the_login_manager(tmp_path: Path) -> None:
    clock = VirtualClock(10_000.0)
    commands = program(tmp_path / "bin", "busctl", "echo 'b true'", "echo 't 9900000000'")
    activity = Activity(root=tmp_path, commands=commands, clock=clock)
    assert activity.read() == Reading(idle_s=100.0)
    program(tmp_path / "bin", "xprintidle", "echo 42500")
    assert activity.read() == Reading(idle_s=42.5)


def test_a_desktop_that_never_tells_its_idleness_says_nothing(tmp_path: Path) -> None:
    commands = program(tmp_path / "bin", "busctl", "echo 'b false'", "echo 't 0'")
    assert Activity(root=tmp_path, commands=commands).read() == Reading()


def test_idle_time_of_a_mac(tmp_path: Path) -> None:
    commands = program(tmp_path / "bin", "ioreg", """echo '    |   "HIDIdleTime" = 2500000000'""")
    assert Activity(root=tmp_path, commands=commands).read() == Reading(idle_s=2.5)


def test_a_program_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sensors, "TIMEOUT_S", 1.0)
    commands = program(tmp_path / "bin", "xprintidle", "exec sleep 60")
    assert commands.ask("xprintidle") == ""


def test_only_needed_sensors_are_read_and_not_too_often(tmp_path: Path) -> None:
    clock = VirtualClock()
    commands = program(tmp_path / "bin", "busctl", "echo 'u 1'")
    calls = tmp_path / "bin" / "busctl.calls"
    senses = Sensors(root=tmp_path, commands=commands, clock=clock)
    policy = OwnerPolicy(pause_on_lid_close=False)
    assert senses.read(policy) == Reading()
    assert not calls.exists()
    policy = OwnerPolicy(pause_on_lid_close=False, pause_on_metered=True)
    for _ in range(3):
        assert senses.read(policy) == Reading(metered=True)
    assert len(calls.read_text().splitlines()) == 1
    clock.advance(SLOW_S)
    senses.read(policy)
    assert len(calls.read_text().splitlines()) == 2


def test_a_sensor_with_nothing_to_say_is_seldom_asked(tmp_path: Path) -> None:
    clock = VirtualClock()
    commands = program(tmp_path / "bin", "busctl", "exit 1")
    calls = tmp_path / "bin" / "busctl.calls"
    senses = Sensors(root=tmp_path, commands=commands, clock=clock)
    for _ in range(int(ABSENT_S / SLOW_S)):
        assert senses.read(OwnerPolicy()) == Reading()
        clock.advance(SLOW_S)
    assert len(calls.read_text().splitlines()) == 1
    senses.read(OwnerPolicy())
    assert len(calls.read_text().splitlines()) == 2
