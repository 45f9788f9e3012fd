from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll.errors import ConfigError
from atoll.netlab import registry
from atoll.netlab.commands import LabError
from atoll.netlab.lab import Lab
from atoll.netlab.shape import parse_shape
from tests.patience import PATIENCE_S

pytestmark = [
    pytest.mark.netlab,
    pytest.mark.long("tests/netlab/test_switch.py::test_cut_host_loses_packets_in_flight"),
]

TRAFFIC = [sys.executable, str(Path(__file__).with_name("traffic.py"))]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", autouse=True)
def _lab_is_possible() -> None:
    if reason := Lab.unavailable():
        pytest.skip(f"no network lab here: {reason}")


@contextlib.contextmanager
def serving(lab: Lab, host: int = 0) -> Iterator[subprocess.Popen[bytes]]:
    """Run the server of the traffic in a host."""
    server = lab.popen(host, [*TRAFFIC, "serve"], stdout=subprocess.PIPE)
    assert server.stdout is not None
    with server, server.stdout:
        try:
            assert server.stdout.readline() == b"ready\n"
            yield server
        finally:
            server.kill()


def numbers(lab: Lab, host: int, *command: str) -> list[float]:
    """Run the client of the traffic in a host and return what it measured."""
    done = lab.run(host, [*TRAFFIC, *command], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return [float(line) for line in done.stdout.split()]


def left_behind(name: str) -> list[str]:
    """Return what exists of a lab on this machine."""
    found = [*registry.namespaces_of(name), *map(str, registry.HOST_FILES.glob(f"atoll-{name}-*"))]
    return [*found, *([name] if registry.folder_of(name).exists() else [])]


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another process brings about."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def test_round_trips_and_rates_are_what_was_asked_for() -> None:
    with Lab(hosts=2, rate="20mbit", rtt="60ms") as lab, serving(lab):
        trips = numbers(lab, 1, "ping", "15")
        assert 0.060 <= statistics.median(trips) < 0.075
        rates = [bps for _ in range(3) for bps in numbers(lab, 1, "push", "2500000")]
        assert 12e6 < statistics.median(rates) < 20e6
        sender, receiver = lab.stats()[1], lab.stats()[0]
        assert 7.5e6 < sender.sent_bytes < 8.5e6
        assert receiver.received_bytes > 7.5e6


def test_link_rates_are_by_direction_and_changeable() -> None:
    with Lab(hosts=2, up="4mbit", rtt="10ms") as lab, serving(lab):
        (up_bps,) = numbers(lab, 1, "push", "500000")
        assert 2e6 < up_bps < 4e6
        lab.shape(1, parse_shape(rate="100mbit", rtt="100ms"))
        (bps,) = numbers(lab, 1, "push", "2000000")
        assert bps > 4e6
        trips = numbers(lab, 1, "ping", "9")
        assert 0.055 <= statistics.median(trips) < 0.075  # (10 + 100) / 2
        assert lab.shape_of(1).rtt_s == pytest.approx(0.1)


def test_an_unlimited_link_is_fast_and_short() -> None:
    with Lab(hosts=2) as lab, serving(lab):
        assert statistics.median(numbers(lab, 1, "ping", "50")) < 0.005
        (bps,) = numbers(lab, 1, "push", "20000000")
        assert bps > 100e6


def test_lost_packets_are_counted_and_tcp_gets_over_them() -> None:
    with Lab(hosts=2, loss="2%", rtt="4ms") as lab, serving(lab):
        assert numbers(lab, 1, "push", "3000000")[0] > 1e6
        assert sum(host.lost_packets for host in lab.stats()) > 0


def test_a_cut_host_hears_nothing_until_it_is_healed() -> None:
    with Lab(hosts=3) as lab, serving(lab):
        lab.cut(1)
        deaf = lab.popen(1, [*TRAFFIC, "ping", "1"], stdout=subprocess.PIPE)
        assert len(numbers(lab, 2, "ping", "3")) == 3  # the others are not concerned
        until(lambda: lab.stats()[1].cut_packets > 0)
        assert deaf.poll() is None
        lab.heal(1)
        output, _ = deaf.communicate(timeout=PATIENCE_S)
        assert float(output) > 0  # TCP has tried again
        assert deaf.returncode == 0


def test_hosts_know_each_other_and_themselves_by_name() -> None:
    code = (
        "import socket; names = ['h0', 'h1', socket.gethostname()];"
        "print(*map(socket.gethostbyname, names))"
    )
    with Lab(hosts=2) as lab:
        done = lab.run(
            1, [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert done.stdout.split() == [lab.address(0), lab.address(1), lab.address(1)]


def test_nothing_is_left_at_the_end_of_the_block() -> None:
    with Lab(hosts=2) as lab:
        process = lab.popen(1, ["sleep", "1000"])
        assert left_behind(lab.name)
    assert process.wait(PATIENCE_S) == -signal.SIGTERM
    assert left_behind(lab.name) == []
    lab.stop()


def test_a_process_that_ignores_the_end_is_killed() -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);print(); time.sleep(99)"
    )
    with Lab(hosts=1) as lab:
        process = lab.popen(0, [sys.executable, "-uc", code], stdout=subprocess.PIPE)
        assert process.stdout is not None
        with process.stdout:
            process.stdout.readline()
    assert process.wait(PATIENCE_S) == -signal.SIGKILL
    assert left_behind(lab.name) == []


def test_an_exception_in_the_block_leaves_nothing() -> None:
    lab = Lab(hosts=2)
    with pytest.raises(KeyError), lab:
        raise KeyError
    assert left_behind(lab.name) == []


def test_a_start_that_fails_half_way_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Lab, host: int) -> None:
        raise LabError("a device broke", given=host)

    monkeypatch.setattr(Lab, "_plug_in", fail)
    lab = Lab(hosts=2)
    with pytest.raises(LabError, match="a device broke"):
        lab.start()
    assert left_behind(lab.name) == []


def test_a_lab_goes_when_its_owner_is_killed() -> None:
    code = (
        "import time; from atoll.netlab.lab import Lab; lab = Lab(hosts=2); lab.start();"
        "lab.popen(0, ['sleep', '1000']); print(lab.name, flush=True); time.sleep(1000)"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    with owner.stdout:
        name = owner.stdout.readline().strip()
    assert left_behind(name)
    owner.kill()
    owner.wait(PATIENCE_S)
    until(lambda: not left_behind(name))


def test_two_labs_do_not_see_each_other() -> None:
    with Lab(hosts=2) as one, Lab(hosts=2) as two, serving(one):
        refused = two.run(
            1, [*TRAFFIC, "ping", "1"], capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert refused.returncode != 0
        assert len(numbers(one, 1, "ping", "1")) == 1


def test_the_command_line_makes_uses_and_removes_a_lab() -> None:
    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "bench.netlab", *arguments]
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )

    name = f"c{os.getpid()}"
    try:
        up = call("up", "--hosts", "2", "--rtt", "10ms", "--name", name)
        assert "10.88.0.1" in up.stdout
        again = call("up", "--name", name)
        assert again.returncode == 1
        assert "is up already" in again.stderr
        echo = call("exec", "--name", name, "1", "--", "cat", "/etc/hosts")
        assert "10.88.0.2 h1" in echo.stdout
        assert call("cut", "1", "--name", name).returncode == 0
        assert call("heal", "1", "--name", name).returncode == 0
        assert len(json.loads(call("stats", "--name", name).stdout)) == 2
    finally:
        down = call("down", "--name", name)
    assert down.returncode == 0
    assert left_behind(name) == []
    assert call("stats", "--name", name).returncode == 1


def test_what_is_asked_for_is_checked_before_anything_is_made() -> None:
    for wrong in (0, 65):
        with pytest.raises(ConfigError, match="1 to 64"):
            Lab(hosts=wrong)
    with pytest.raises(ConfigError, match="1 to 12"):
        Lab(name="../etc")
    with pytest.raises(ConfigError, match="20mbit"):
        Lab(rate="fast")
    with pytest.raises(LabError, match="no such host"):
        Lab(hosts=2).address(2)
    with pytest.raises(LabError, match="no such lab"):
        Lab.attach("nobody")
