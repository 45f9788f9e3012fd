"""Ctrl+C at any moment: everything is gone in five seconds, and the work goes on afterwards."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import psutil
import pytest

from atoll.hub.options import HubOptions
from tests.commands import Done
from tests.e2e.conftest import ENDLESS, Atoll, Running, until
from tests.tiers import sampled

pytestmark = pytest.mark.e2e

LIMIT_S = 90.0
"""The promise is five: these tests share their machine with others, and each of several processes
may be kept waiting. A command that waits for a round to end takes two minutes."""


def interrupt(atoll: Atoll, running: Running, number: int = signal.SIGINT) -> Done:
    begun = time.monotonic()
    running.interrupt(number)
    done = running.wait()
    took_s = time.monotonic() - begun
    assert took_s <= LIMIT_S, f"{took_s:.1f} s"
    atoll.assert_ended()
    return done


def imports_msgspec(running: Running) -> bool:
    """Return whether the command's own imports have begun."""
    return any("msgspec" in part.path for part in psutil.Process(running.popen.pid).memory_maps())


@pytest.mark.skipif(
    not hasattr(psutil.Process, "memory_maps"), reason="this system does not show what is loaded"
)
@pytest.mark.parametrize(
    "moment_s",
    sampled(
        [0.0, 1.2, 3.5],
        lambda moment_s: moment_s == 1.2,
        "tests/e2e/test_interrupt.py::test_interrupted_start_leaves_nothing_behind",
    ),
)
def test_interrupted_start_leaves_nothing_behind(atoll: Atoll, moment_s: float) -> None:
    running = atoll.start("demo")
    # Before that Python itself starts: it may end with any status, or lose the interrupt.
    until(lambda: imports_msgspec(running))
    time.sleep(moment_s)
    done = interrupt(atoll, running)
    assert done.code in (130, -signal.SIGINT), done.both


def damage(folder: Path) -> None:
    """Turn a byte of every checkpoint."""
    for part in folder.glob("checkpoints/*/shared.safetensors"):
        data = bytearray(part.read_bytes())
        data[-10] ^= 0xFF
        part.write_bytes(bytes(data))


@pytest.mark.parametrize(
    "members",
    sampled(
        [1, 2],
        lambda members: members == 1,
        "tests/e2e/test_interrupt.py::test_job_resumes_after_sigterm_and_after_sigkill",
    ),
)
def test_job_resumes_after_sigterm_and_after_sigkill(atoll: Atoll, members: int) -> None:
    """SIGTERM is as good as Ctrl+C; a killed command takes everything with it."""
    job = atoll.job(steps=600, every=20, nodes=str(members), paced=True)
    running = atoll.start("run", str(job), "--local", str(members))
    until(lambda: list(atoll.runs.glob("*/checkpoints/*/manifest.json")))
    done = interrupt(atoll, running, signal.SIGTERM)
    assert done.code == 130
    folder = atoll.job_folder()
    assert f"atoll resume runs/{folder.name}" in done.out
    assert "kept" in done.out
    killed = atoll.start("resume", f"runs/{folder.name}")
    until(lambda: len(atoll.workers()) == members)
    psutil.Process(killed.popen.pid).kill()
    killed.wait()
    until(lambda: not atoll.processes())
    resumed_again = atoll.start("resume", f"runs/{folder.name}")
    until(lambda: atoll.running("atoll.node"))  # their hub has just started
    started_s = time.time()
    again = resumed_again.wait()
    assert again.code == 0, again.both
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 600
    assert summary["replicas_identical"] is True
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    resumed = next(event for event in events if event["kind"] == "resumed")
    assert "checkpoint of round" in resumed["text"]
    lost = next(event for event in events if event["kind"] == "member-lost")
    waited_s = lost["time"] - started_s
    assert waited_s < HubOptions.restart_grace_s / 2, (
        "nobody waits for members that ended with their command"
    )
    atoll.assert_ended()


@pytest.mark.long("tests/checkpoint/stores/test_hub_store.py::test_damage_at_the_hub_is_named")
def test_damaged_checkpoint_is_named_and_not_used(atoll: Atoll) -> None:
    running = atoll.start(
        "run", str(atoll.job(steps=ENDLESS, every=20, paced=True)), "--local", "1"
    )
    until(lambda: list(atoll.runs.glob("*/checkpoints/*/manifest.json")))
    interrupt(atoll, running)
    folder = atoll.job_folder()
    damage(folder)
    done = atoll.run("resume", f"runs/{folder.name}")
    assert done.code == 1, done.both
    assert "shared.safetensors" in done.err
    atoll.assert_ended()
