"""Make a process that a node agent started a member: session, group and recovery client."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from atoll.checkpoint import BackgroundSaver, HubStore, HubTarget
from atoll.clock import RealClock
from atoll.config import JobTable, WorkerEnvironment, load_spec
from atoll.config.redaction import Redaction
from atoll.errors import AuthError
from atoll.group.connect import Connection, connect_group
from atoll.group.routes.rendezvous_store import own_address
from atoll.net.endpoint import endpoint_of
from atoll.net.line_use import LineUse
from atoll.net.sync_link import SyncLink
from atoll.recovery import Recipient, Recovered, StateServer, recover
from atoll.train.state.recovery_client import RecoveryClient
from atoll.wire.messages import CheckpointPart, CheckpointState, Event, Finished, Source, Sources

log = logging.getLogger(__name__)

RECOVERY_TIMEOUT_S = 3600.0
"""Longest time that one recovery may take: a large model on a slow link."""

PUBLISH_TIMEOUT_S = 60.0
LINE_FILE = "line-use"


@dataclass(frozen=True, slots=True)
class JoinedJob:
    """A member's connection to its job."""

    environment: WorkerEnvironment
    connection: Connection
    recovery: RecoveryClient
    server: StateServer
    line: LineUse

    @property
    def late(self) -> bool:
        """Whether the run is under way: recover the committed state before the first step."""
        return self.connection.registered.recover

    @property
    def replaced(self) -> bool:
        """Whether the session has ended for good, e.g. because a newer process took this place."""
        return self.connection.link.failed is not None

    def leave(self, reason: str) -> None:
        """Leave the group soon; a round under way is finished or abandoned. Thread-safe."""
        threading.Thread(
            target=lambda: self.connection.group.leave(reason), name="leave", daemon=True
        ).start()

    def store(self) -> HubStore:
        """Return the store from which the job's checkpoints are read."""
        environment = self.environment
        return HubStore.reading(
            environment.hub, environment.token, environment.job,
            endpoint=endpoint_of(environment), scratch=environment.directory,
        )  # fmt: skip

    def saver(self) -> BackgroundSaver:
        """Return the background writer that saves this member's checkpoints and uploads them."""
        environment, link = self.environment, self.connection.link

        def publish(part: CheckpointPart) -> bool:
            answer = link.request(part, timeout_s=PUBLISH_TIMEOUT_S)
            return isinstance(answer, CheckpointState) and answer.published

        target = HubTarget(
            url=environment.hub, token=environment.token, job=environment.job,
            ca=environment.ca, proxy=environment.proxy,
            upload_bps=environment.upload_bps, pace=environment.pace,
            line=str(environment.directory / LINE_FILE),
        )  # fmt: skip
        return BackgroundSaver(
            target, scratch=environment.directory, publish=publish, on_event=link.notify
        )

    def close(self, finished: Finished | None = None) -> None:
        """Stop serving the state, send the final message `finished`, and close the session."""
        self.server.close()
        self.line.close()
        if finished is not None and finished.error is not None:
            hide = Redaction.of_environment(load_spec(self.environment.spec).launch)
            finished = msgspec.structs.replace(finished, error=hide.fields(finished.error))
        try:
            self.connection.close(finished)
        except AuthError as error:
            # The token is revoked when the job ends: the hub received the message, only its answer
            # was lost.
            log.info("the job is over: %s", error)


def join_job(
    environment: WorkerEnvironment, job: JobTable, *, should_stop: Callable[[], bool]
) -> JoinedJob:
    """Open a member's session, register it, and start to recover if the run is under way.

    `job` says the route, and whether members encrypt; `should_stop` ends waiting for a state.

    Raises:
        HubUnreachable: no hub answers at this address.
        AuthError: the job's token is no longer valid, e.g. because the job has ended.
        VersionMismatch: the hub is of another version.
    """
    servers: list[StateServer] = []
    line = LineUse(environment.directory / LINE_FILE)
    encrypted = job.encryption == "on"
    if not encrypted:
        log.warning("what members send each other directly is not encrypted: encryption = off")

    def serve(link: SyncLink) -> list[str]:
        servers.append(
            StateServer(
                job=environment.job,
                token=environment.token,
                address="" if environment.relayed else own_address(environment.hub),
                link=link,
                encrypted=encrypted,
                line=line,
            )
        )
        return servers[0].dial

    try:
        connection = connect_group(environment, route=job.route, serve=serve, line=line)
    except BaseException:
        for started in servers:
            started.close()
        line.close()
        raise
    (server,) = servers
    link, group = connection.link, connection.group

    def sources(failed: Sequence[str], *, ready: bool, needs_s: float) -> Sources:
        found = group.recover(failed, ready=ready, needs_s=needs_s)
        if environment.relayed:  # it dials no other member
            peers = [Source(peer.member) for peer in found.peers]
            found = msgspec.structs.replace(found, peers=peers)
        return found

    def fetch(
        *, ready: bool, distrusted: Sequence[str] = (), older: Recovered | None = None
    ) -> Recovered:
        needs_s = older.again_s if older is not None else 0.0
        return recover(
            Recipient(link, environment.job, environment.member, announce, stop=should_stop),
            ask=lambda question: sources(question.failed, ready=ready, needs_s=needs_s),
            deadline=RealClock().monotonic() + RECOVERY_TIMEOUT_S, distrusted=distrusted,
            older=older,
        )  # fmt: skip

    def announce(event: Event) -> None:
        if link.failed is None:
            link.notify(event)

    recovery = RecoveryClient(
        group, fetch=fetch, server=server, announce=announce,
        should_stop=lambda: should_stop() or link.failed is not None,
    )  # fmt: skip
    enrolled = JoinedJob(environment, connection, recovery, server, line)
    if enrolled.late:
        recovery.begin()
    return enrolled
