"""From what a node agent told a process to its place in the group."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from atoll.config import WorkerEnvironment
from atoll.group.hub import HubGroup
from atoll.ids import session_id
from atoll.net.api import HubClient
from atoll.net.sync_link import SyncLink, connect
from atoll.wire.messages import Finished, Registered

CONNECT_TIMEOUT_S = 60.0
"""A hub that was just restarted is waited for this long."""


@dataclass(frozen=True, slots=True)
class Connection:
    """One member's link, group and place."""

    environment: WorkerEnvironment
    link: SyncLink
    group: HubGroup
    registered: Registered

    def publish(self, path: Path, name: str) -> None:
        """Upload a file to the job's folder at the hub.

        Raises:
            HubError: the hub did not take it.
            StorageFull: the hub's disk is full.
        """
        with HubClient(self.environment.hub, self.environment.token) as client:
            client.put_file(self.environment.job, name, path)

    def close(self, finished: Finished | None = None) -> None:
        """Leave the group, with last words if there are any."""
        self.group.close()
        self.link.close(finished)


def connect_group(environment: WorkerEnvironment, *, route: str = "auto") -> Connection:
    """Open the member's session with the hub and enter the job.

    Raises:
        HubUnreachable: no hub answers at the address.
        AuthError: the hub does not take the token.
        VersionMismatch: the hub is of another version.
    """
    link = connect(
        environment.hub,
        session=session_id(environment.job, environment.member),
        token=environment.token,
        timeout_s=CONNECT_TIMEOUT_S,
        patient=True,
    )
    try:
        group = HubGroup(
            link,
            job=environment.job,
            member=environment.member,
            hub=environment.hub,
            route=route,
        )
        return Connection(environment, link, group, group.register())
    except BaseException:
        link.close()
        raise
