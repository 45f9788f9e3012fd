"""Lines between machines: on the loopback, and between two hosts of a network lab."""

from __future__ import annotations

import itertools
import json
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from atoll.netlab.lab import Lab
from atoll.node.machine import lines
from atoll.node.machine.lines import Line, Listener, measure_line
from tests.patience import PATIENCE_S, PROMPT_S

SECRET = bytes(range(16))
ROOT = Path(__file__).resolve().parents[3]

LISTEN = """
import sys, time
from atoll.node.machine.lines import Listener
print(Listener(bytes(range(16)), seconds=2.0).port, flush=True)
time.sleep(1000)
"""
MEASURE = """
import dataclasses, json, sys
from atoll.node.machine.lines import measure_line
line = measure_line("w1", ["h1"], int(sys.argv[1]), secret=bytes(range(16)), seconds=2.0)
print(json.dumps(dataclasses.asdict(line)))
"""


class Ticks:
    """A clock that goes on by a millisecond whenever somebody looks: pauses do not count."""

    def __init__(self) -> None:
        self._looks = itertools.count(1)

    def monotonic(self) -> float:
        return next(self._looks) / 1000

    perf_counter = monotonic


def test_a_listener_is_measured_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "time", Ticks())
    monkeypatch.setattr(lines, "CONNECT_S", PATIENCE_S)
    with Listener(SECRET, seconds=0.2) as listener:
        found = measure_line("w1", ["127.0.0.1"], listener.port, secret=SECRET, seconds=0.2)
    assert found.to == "w1"
    assert found.up_mbps > 10
    assert found.down_mbps > 10
    assert found.latency_ms == pytest.approx(1), "one look at the clock"


def test_who_does_not_know_the_secret_learns_nothing() -> None:
    with Listener(SECRET, seconds=0.2) as listener:
        found = measure_line("w1", ["127.0.0.1"], listener.port, secret=bytes(16), seconds=0.2)
    assert found == Line(to="w1")


def test_closed_listener_ends_its_thread() -> None:
    others = set(threading.enumerate())
    with Listener(SECRET, seconds=0.2):
        new = set(threading.enumerate()) - others
        (thread,) = [one for one in new if one.name == "lines"]
    thread.join(PROMPT_S)
    assert not thread.is_alive()


def test_an_address_that_nobody_answers_has_no_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
    assert measure_line("w1", ["127.0.0.1"], port, secret=SECRET, seconds=0.1) == Line(to="w1")


@pytest.mark.netlab
def test_rates_and_round_trip_are_those_of_the_lab() -> None:
    if reason := Lab.unavailable():
        pytest.skip(f"no network lab here: {reason}")
    with Lab(hosts=2, up="8mbit", down="20mbit", rtt="40ms") as lab:
        listening = lab.popen(
            1, [sys.executable, "-c", LISTEN], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert listening.stdout is not None
        with listening.stdout:
            port = listening.stdout.readline().strip()
            done = lab.run(
                0, [sys.executable, "-c", MEASURE, port], cwd=ROOT, capture_output=True, text=True,
                timeout=PATIENCE_S,
            )  # fmt: skip
    listening.wait(PATIENCE_S)
    found = json.loads(done.stdout)
    # Both directions leave by an upload of 8 Mbit/s; headers are not counted.
    assert found["up_mbps"] == pytest.approx(8, rel=0.25)
    assert found["down_mbps"] == pytest.approx(8, rel=0.25)
    assert found["latency_ms"] == pytest.approx(40, rel=0.5)
