"""Members that do not come back after a restart of the hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.errors import StorageFull
from atoll.hub.nodes.membership import Membership
from atoll.hub.server import HubServer
from tests.hub.membership import Running, job_of, options, until


def test_absent_members_are_noticed_once_the_disk_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HubServer(options(tmp_path)) as hub:
        group = Running(hub)
        for peer in (*group.members, group.reducer, group.agent):
            peer.cut()
    reckon, failed = Membership.reckon, list[bool]()

    async def fails_once(membership: Membership) -> None:
        if not failed:
            failed.append(True)
            raise StorageFull("no room is left")
        await reckon(membership)

    monkeypatch.setattr(Membership, "reckon", fails_once)
    with HubServer(options(tmp_path, restart_grace_s=0.1)) as again:
        until(lambda: job_of(again, group.job).members["w1"].state == "lost", "a loss")
    assert failed
