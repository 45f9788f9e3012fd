"""A run at a hub of which the disk fills up waits, says so once, and keeps all that it trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.cli.hub_access import KnownHub, remember
from atoll.hub.alarms.watch import AlarmIntervals
from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from tests.e2e.conftest import Atoll, until, wait_for
from tests.small_disk import fill, small_disk

pytestmark = pytest.mark.e2e

DISK_BYTES = 256 * 2**20
"""Below 1 % of it is critical, whatever the least bytes are."""

LEFT_BYTES = 3 * 2**20
"""Room for the database and the rounds, not for a model of 6.6 MB."""

STEPS = 20


@pytest.mark.long(
    "tests/hub/rounds/test_disk_full.py::test_job_with_a_trained_model_that_finds_no_room_is_paused"
)
def test_run_waits_for_room_at_its_end_and_trains_nothing_twice(
    atoll: Atoll, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    options = HubOptions(
        data=disk / "data",
        jobs=disk / "runs",
        alarm_intervals=AlarmIntervals(every_s=0.5, nodes_every=2, patience=0.25),
    )
    with small_disk(disk, nbytes=DISK_BYTES), HubServer(options) as server:
        known = KnownHub(server.url, server.operator_token, operator=True)
        remember(known, home=atoll.home)
        for name in ("lap1", "lap2"):
            atoll.join(server.ticket, name=name)
        filler = fill(disk)
        with filler.open("rb+") as file:
            file.truncate(filler.stat().st_size - LEFT_BYTES)
        text = atoll.job(steps=STEPS, every=5, width="256", layers="2", heads="4").read_text()
        with known.client() as client:
            until(lambda: len(client.nodes()) == 2)
            job = client.submit(text)
            full = until(lambda: (view := client.job(job))["paused"] and view)
            assert full["state"] == "running"
            assert full["progress"]["step"] == STEPS
            assert "no room is left on the hub's disk for what lap" in full["paused_reason"]
            until(lambda: any(one["kind"] == "disk-filling" for one in client.alarms()))
            (alarm,) = [one for one in client.alarms() if one["severity"] == "critical"]
            assert (alarm["kind"], alarm["node"]) == ("disk-filling", "hub")
            assert "jobs wait while it is full, and keep what they trained" in alarm["remedy"]
            shown = atoll.run_here("status").both
            assert "paused" in shown
            assert "free some space there" in shown
            filler.unlink()
            ended = wait_for(client, job, "done", "failed", "stopped")
            assert ended["state"] == "done", ended
            assert [member["attempt"] for member in ended["members"]] == [1, 1]
            assert ended["progress"]["step"] == STEPS
            kinds = {event["kind"] for event in client.events(job)["events"]}
            assert {"waits-for-room", "found-room", "done"} <= kinds
            assert "alarm:rewound" not in kinds
            # With enough free the alarm ends by itself: 200 MB, and 5 % of the disk.
            until(lambda: all(one["kind"] != "disk-filling" for one in client.alarms()))
        assert (disk / "runs" / job / "model.safetensors").stat().st_size > LEFT_BYTES
