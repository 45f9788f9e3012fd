"""Parameter servers for real: hub, agent, workers and two reducers; some of them killed."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.kit.ports import free_port
from tests.e2e.conftest import Atoll, ticket_of, until
from tests.e2e.test_faults import events_of, folder_of
from tests.e2e.test_hub_restart import check_end, committed, ready, worker_pids

pytestmark = pytest.mark.e2e


STEPS = 1_000
"""Long enough to be still at it when all that was killed is back."""


def with_options(path: Path, *lines: str) -> Path:
    """Add lines to the table of the strategy."""
    text = path.read_text().replace("[strategy]", "\n".join(["[strategy]", *lines]))
    path.write_text(text)
    return path


def reducers(atoll: Atoll) -> dict[str, psutil.Process]:
    """Return the processes of reducers by name."""
    found: dict[str, Any] = {}
    for process in atoll.running("atoll.reducer"):
        with contextlib.suppress(psutil.Error):
            found[process.environ()["ATOLL_MEMBER"]] = process
    return found


def rounds(folder: Path) -> int:
    """Return how many rounds the first member has told of."""
    metrics = folder / "metrics.jsonl"
    if not metrics.exists():
        return 0
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return max((line["round"] for line in lines if line["member"] == "w0"), default=0)


@pytest.mark.long(
    "tests/strategies/parameter_server/test_routes.py"
    "::test_a_killed_server_is_loaded_with_what_its_members_have"
)
@pytest.mark.parametrize("preset", ["async-diloco", "async-look-ahead", "halos"])
def test_a_killed_member_and_a_killed_server_do_not_end_a_run(atoll: Atoll, preset: str) -> None:
    job = atoll.job(steps=STEPS, every=10, paced=True, preset=f'"{preset}"')
    with_options(job, "servers = 2", "anchor_every = 150")
    running = atoll.start("run", str(job), "--local", "3")
    folder = folder_of(atoll)
    until(lambda: rounds(folder) >= 2)
    assert sorted(reducers(atoll)) == ["reducer", "reducer-1"]
    atoll.worker("w1").kill()
    reducers(atoll)["reducer-1"].kill()
    done = running.wait()
    assert done.code == 0, done.both
    # On a busy machine others may be taken for lost meanwhile, and come back too.
    assert "w1" in [event["member"] for event in events_of(folder, "recovered")]
    assert events_of(folder, "reducer-ended")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["replicas_identical"] is True
    assert summary["steps"] == STEPS
    assert summary["loss_final"] < summary["loss_first"]
    atoll.assert_ended()


@pytest.mark.long(
    "tests/strategies/parameter_server/test_routes.py::test_a_killed_server_is_loaded_with_what_its_members_have"
)
def test_run_survives_a_killed_hub_and_its_servers(atoll: Atoll) -> None:
    words = ["hub", "--host", "127.0.0.1", "--port", str(free_port())]
    hub = atoll.start(*words)
    known = ready(atoll, hub)
    for name in ("n0", "n1"):
        atoll.join(ticket_of(known), name=name)
    job = atoll.job(steps=800, every=10, paced=True, preset='"async-diloco"')
    with_options(job, "anchor_every = 150")
    with known.client() as client:
        until(lambda: len(client.nodes()) == 2)
        name = client.submit(job.read_text())
        until(lambda: committed(client, name) >= 2)
    pids = worker_pids(atoll)
    hub.popen.kill()
    hub.wait()
    ready(atoll, atoll.start(*words))
    check_end(atoll, known, name, steps=800, pids=pids)
