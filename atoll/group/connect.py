"""Connects a process started by a node agent to its job."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.config import WorkerEnvironment
from atoll.errors import ConfigError, StorageFull
from atoll.group.hub import HubGroup
from atoll.ids import session_id
from atoll.net.endpoint import endpoint_of
from atoll.net.handshake import make_hello
from atoll.net.http.client import HubClient
from atoll.net.line_use import LineUse
from atoll.net.sync_link import SyncLink, connect
from atoll.wire.job_messages import FOUND_ROOM, WAITS_FOR_ROOM
from atoll.wire.messages import Event, Finished, Registered

CONNECT_TIMEOUT_S = 60.0
"""Limit of the first connection: the hub may be restarting when a worker starts."""


ROOM_POLL_S = 5.0
"""Time between two tries to store a file at a hub without room."""


@dataclass(frozen=True, slots=True)
class Connection:
    """A member's session with the hub, and its group."""

    environment: WorkerEnvironment
    link: SyncLink
    group: HubGroup
    registered: Registered

    def publish(self, path: Path, name: str) -> None:
        """Upload a file of this member atomically; while the hub's disk is full, wait for room.

        What was trained would be lost otherwise. A stop ends the wait: the process is killed when
        its grace period is over.

        Raises:
            HubUnreachable: the hub does not answer.
            LimitReached: the job has used up its quota.
        """
        environment = self.environment
        endpoint = endpoint_of(environment)
        with HubClient(environment.hub, environment.token, endpoint=endpoint) as client:
            when_there_is_room(
                lambda: client.put_file(environment.job, name, path),
                tell=lambda kind, text: self.link.notify(Event(kind, f"{name} {text}")),
            )

    def close(self, finished: Finished | None = None) -> None:
        """Leave the group, report the result, and close the session."""
        try:
            self.group.close()
        finally:
            self.link.close(finished)


def when_there_is_room(
    put: Callable[[], object],
    *,
    tell: Callable[[str, str], object],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Store something at the hub, again until its disk has room for it.

    Args:
        put: Stores it; raises StorageFull while there is no room.
        tell: Gets the kind of an event and its text: at every try, since a hub that was restarted
            meanwhile knows nothing of the wait.
        sleep: Waits.
    """
    waited = False
    while True:
        try:
            put()
        except StorageFull:
            tell(WAITS_FOR_ROOM, "waits for room on the hub's disk: free some space there")
            waited = True
            sleep(ROOM_POLL_S)
            continue
        if waited:
            tell(FOUND_ROOM, "is stored: there is room again")
        return


def connect_group(
    environment: WorkerEnvironment,
    *,
    route: str = "auto",
    serve: Callable[[SyncLink], Sequence[str]] | None = None,
    line: LineUse | None = None,
) -> Connection:
    """Open the session of a member and register it with its job.

    A member on a machine with a bandwidth limit does not accept direct connections, so that all its
    traffic passes the limit.

    Args:
        environment: Settings from the node agent.
        route: `auto`, `direct` or `relay`.
        serve: Starts the server of the committed state on the member's session; returns the
            host:port at which it listens.
        line: Records when exchanges use the line of this machine.

    Raises:
        HubUnreachable: no hub answers there.
        AuthError: the job's token is no longer valid, e.g. because the job has ended.
        VersionMismatch: the hub has another version.
        ConfigError: the job requires the direct route on a machine with limited bandwidth.
    """
    if route == "direct" and environment.relayed:
        raise ConfigError(
            "this machine does not take part in the direct route",
            given='route = "direct", and an owner who limits its bandwidth or network',
            expected="a route through the hub, where the limit holds",
            remedy='set route = "auto" in [job], or name other machines: on = [...]',
        )
    groups: list[HubGroup] = []

    def stats() -> dict[str, float]:
        """Return the traffic of this member: control frames here, tensors on either route."""
        sent = received = 0
        for group in groups:
            sent, received = group.sent_bytes, group.received_bytes
        counters = link.counters
        return {
            "sent_bytes": float(counters.sent_control_bytes + sent),
            "received_bytes": float(counters.received_control_bytes + received),
        }

    link = connect(
        environment.hub,
        make_hello(session_id(environment.job, environment.member), environment.token),
        endpoint=endpoint_of(environment),
        stats=lambda: stats() if groups else {},
        timeout_s=CONNECT_TIMEOUT_S,
        patient=True,
    )
    try:
        group = HubGroup(
            link,
            job=environment.job,
            member=environment.member,
            hub=environment.hub,
            route="relay" if environment.relayed else route,
            line=line,
        )
        groups.append(group)
        registered = group.register(state=serve(link) if serve is not None else ())
    except BaseException:
        try:
            for group in groups:
                group.close()
        finally:
            link.close()
        raise
    return Connection(environment, link, group, registered)
