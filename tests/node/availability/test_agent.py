"""A real agent whose machine's battery, and whose owner's policy, change while it works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from atoll.net.http.client import HubClient
from tests.node.availability.message_bus import announce, bus
from tests.node.availability.test_sensors import supply
from tests.node.running import submit, until
from tests.patience import PATIENCE_S

__all__ = ["bus"]  # a fixture

AGENT = """
import logging, sys
from pathlib import Path
from atoll.net.endpoint import parse_ticket
from atoll.node.availability import rule
from atoll.node.agent.options import NodeOptions
from atoll.node.agent.serve import run_node

logging.basicConfig(level=logging.INFO)
rule.BEGIN_S, rule.END_S = 0.2, 1.0  # seconds instead of half a minute
ticket, home, machine = sys.argv[1:]
run_node(
    NodeOptions(
        ticket=parse_ticket(ticket), home=Path(home), machine=Path(machine), measure=False,
        name="laptop",
    )
)
"""

WORKS_FOR_EVER = """
import time
print("at work", flush=True)
time.sleep(600)
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    options = HubOptions(data=tmp_path / "hub", jobs=tmp_path / "runs", reducers=False)
    with HubServer(options) as made:
        yield made


class Laptop:
    """An agent in a process, on a machine made of files."""

    def __init__(self, hub: HubServer, folder: Path) -> None:
        self.machine, self.home = folder / "machine", folder / "home"
        self.home.mkdir()
        self.mains()
        self.policy('pause_on_battery = true\nlabels = ["sofa"]\nnice = 5\n')
        self.popen = subprocess.Popen(
            [sys.executable, "-c", AGENT, hub.ticket, str(self.home), str(self.machine)],
            stderr=subprocess.PIPE,
            text=True,
        )

    def mains(self) -> None:
        supply(self.machine, "AC", type="Mains", online="1")
        supply(self.machine, "BAT0", type="Battery", status="Charging", capacity="70")

    def battery(self) -> None:
        supply(self.machine, "AC", type="Mains", online="0")
        supply(self.machine, "BAT0", type="Battery", status="Discharging", capacity="70")

    def policy(self, text: str) -> None:
        scratch = self.home / "node.toml.new"
        scratch.write_text(text)
        os.replace(scratch, self.home / "node.toml")

    def end(self) -> str:
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.communicate(timeout=PATIENCE_S)[1]


@pytest.fixture
def laptop(hub: HubServer, tmp_path: Path) -> Iterator[Laptop]:
    made = Laptop(hub, tmp_path)
    yield made
    if made.popen.poll() is None:
        made.popen.kill()
    made.popen.communicate()


def only_node(client: HubClient) -> dict[str, Any]:
    nodes = until(client.nodes)
    return dict(nodes[0])


def only_member(client: HubClient, job: str) -> dict[str, Any]:
    members = client.job(job)["members"]
    return dict(members[0]) if members else {}


@pytest.mark.e2e
def test_laptop_returns_work_on_battery(hub: HubServer, laptop: Laptop) -> None:
    with HubClient(hub.url, hub.operator_token) as client:
        job = submit(client, WORKS_FOR_EVER)

        def lines() -> int:
            return [line["text"] for line in client.logs(job)["lines"]].count("at work")

        until(lambda: lines() == 1)
        offer = only_node(client)["info"]["offer"]
        assert offer["labels"] == ["sofa"]
        assert not offer.get("paused")
        assert "no work on battery" in offer["text"]
        laptop.battery()
        until(lambda: only_node(client)["info"]["offer"].get("paused") == "on battery")
        until(lambda: only_node(client)["drain_reason"] == "on battery")
        until(lambda: only_member(client, job)["state"] in ("left", "lost", "waiting"))
        stats = until(lambda: (s := only_node(client)["stats"]).get("on_battery") == 1.0 and s)
        assert stats["battery_percent"] == 70.0
        assert lines() == 1
        laptop.mains()
        until(lambda: only_node(client)["info"]["offer"].get("paused", "") == "")
        until(lambda: lines() == 2)
        client.stop(job, grace_s=1.0)
    said = laptop.end()
    assert laptop.popen.returncode == 0, said
    assert "takes no more work: on battery" in said


@pytest.mark.e2e
def test_only_a_valid_policy_change_takes_effect(hub: HubServer, laptop: Laptop) -> None:
    with HubClient(hub.url, hub.operator_token) as client:
        until(lambda: client.nodes() and only_node(client)["info"].get("offer"))
        laptop.policy("cores = 1.5\nkinds = ['trainer']\n")
        offer = until(
            lambda: (o := only_node(client)["info"]["offer"])["kinds"] == ["trainer"] and o
        )
        assert offer["cores"] == 1.5
        laptop.policy("kinds = ['traner']\n")
        job = submit(client, WORKS_FOR_EVER)  # a script: its owner runs trainers only
        view = until(lambda: (v := client.job(job))["reason"] and v)
        assert view["state"] == "waiting"
        assert "script" in view["reason"]
        assert only_node(client)["info"]["offer"]["kinds"] == ["trainer"]
        client.stop(job, grace_s=0.0)
        until(lambda: "did you mean 'trainer'?" in str(only_node(client)["info"]["offer"]["text"]))
    laptop.end()


@pytest.mark.e2e
@pytest.mark.usefixtures("bus")
def test_laptop_leaves_before_sleep_and_returns(hub: HubServer, laptop: Laptop) -> None:
    with HubClient(hub.url, hub.operator_token) as client:
        job = submit(client, WORKS_FOR_EVER)

        def lines() -> int:
            return [line["text"] for line in client.logs(job)["lines"]].count("at work")

        def logged(sleeping: str) -> str:
            """Announce, and return why the machine pauses."""
            announce(sleeping)
            return str(only_node(client)["info"]["offer"].get("paused", ""))

        until(lambda: lines() == 1)
        until(lambda: logged("true") == "the machine goes to sleep")
        until(lambda: only_member(client, job)["state"] in ("left", "lost", "waiting"))
        until(lambda: not logged("false"))
        until(lambda: lines() == 2)
        client.stop(job, grace_s=1.0)
    listeners = psutil.Process(laptop.popen.pid).children()
    assert any(child.name() == "dbus-monitor" for child in listeners)
    laptop.popen.kill()  # nothing of it stays, however it ends
    _, left = psutil.wait_procs(listeners, timeout=PATIENCE_S)
    assert not left
