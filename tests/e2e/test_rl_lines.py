"""Policies and their critic on machines with slow, long lines between them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.netlab.lab import Lab
from tests.e2e.conftest import shared_cache, until
from tests.e2e.test_rl import job
from tests.e2e.test_two_machines import HUB, PORT, TwoMachines

pytestmark = [pytest.mark.e2e, pytest.mark.netlab]
pytest.importorskip("gymnasium")

STEPS = 8_000


@pytest.fixture
def machines(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoMachines]:
    if reason := Lab.unavailable():
        pytest.skip(f"no network lab here: {reason}")
    with Lab(hosts=3, rate="20mbit", rtt="80ms") as lab:
        made = TwoMachines(tmp_path, lab, cache=shared_cache(tmp_path_factory))
        try:
            yield made
        finally:
            made.end()


def gather(machines: TwoMachines) -> None:
    """Start the hub on its own host, and two nodes with room for two members each far from it."""
    hub = machines.on(HUB, "hub", "--port", str(PORT), "--advertise", "h0")
    assert hub.popen.stdout is not None
    ticket = ""
    while not ticket:
        line = hub.popen.stdout.readline()
        assert line, hub.wait().both
        ticket = next((word for word in line.split() if word.startswith("atoll://h0:")), "")
    for host in (1, 2):
        machines.on(host, "join", ticket, "--name", f"n{host}", "--slots", "2")


def updates(machines: TwoMachines, member: str) -> float:
    """Return the updates that a member has told of."""
    lines = [
        json.loads(line)
        for path in machines.runs.glob("tiny-*/metrics.jsonl")
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]
    told = [line["values"].get("updates", 0.0) for line in lines if line["member"] == member]
    return float(max(told, default=0.0))


@pytest.mark.long(
    "tests/rl/channel/test_channel_faults.py::test_at_a_real_hub_both_killed_count_everything_once"
)
def test_an_actor_and_the_critic_come_back_over_slow_long_lines(machines: TwoMachines) -> None:
    gather(machines)
    (machines.folder / "rl.toml").write_text(
        job("one", "two", steps=STEPS, more="record = false\nqueue_items = 64")
    )
    running = machines.train(machines.folder / "rl.toml")
    members = ("w0", "w1", "w2")
    until(lambda: min(updates(machines, member) for member in members) > 8)
    machines.worker("w1").kill()
    machines.worker("w0").kill()
    done = running.wait()
    assert done.code == 0, done.both
    told = machines.summary()["rl"]
    sent = sum(policy["updates"] for policy in told["policies"])
    assert [policy["env_steps"] for policy in told["policies"]] == [STEPS, STEPS]
    assert sent == 2 * STEPS // 64
    critic = told["critic_member"]
    dropped = critic["dropped"]
    assert critic["trajectories"] + dropped.get("oldest", 0) + dropped.get("stale", 0) == sent
    assert critic["trajectories"] > sent // 2
