"""What a worker runs in a job whose model has paths."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from atoll.config import JobSpec, WorkerEnvironment
from atoll.group.hub_requests import HubRequests
from atoll.net.endpoint import endpoint_of
from atoll.net.http.client import HubClient
from atoll.net.sync_link import SyncLink
from atoll.train.join_job import JoinedJob
from atoll.train.paths.states import JobModules
from atoll.train.paths.trainer import PathMember, PathTrainer
from atoll.train.results.metrics import metrics_outbox
from atoll.train.results.outputs import Outputs
from atoll.wire.paths import PathAsk, PathMeeting, PathTrained, PathTurn

SENT = "sha256:"
"""Prefix of an assignment that was sent to the hub with the job."""
FLUSH_TIMEOUT_S = 10.0
PATIENCE_S = 600.0
"""How long an unreachable hub is waited for, including its restarts."""


class HubTurns:
    """Asks the hub for turns; see :class:`~atoll.train.paths.trainer.Turns`."""

    def __init__(self, link: SyncLink) -> None:
        """Ask over `link`, also over restarts of the hub."""
        self._requests = HubRequests(link, patience_s=PATIENCE_S)

    def ask(self, body: PathAsk) -> PathTurn:
        """Return the next turn; of phase -1 if there is none yet."""
        return self._requests.ask(body, PathTurn)

    def trained(self, body: PathTrained) -> PathMeeting:
        """Say that the paths are trained; return whether modules meet now."""
        return self._requests.ask(body, PathMeeting)


def with_assignment(spec: JobSpec, environment: WorkerEnvironment) -> JobSpec:
    """Return the job with its assignment as a file in this member's folder.

    Raises:
        HubError: the hub does not have it.
    """
    reference = spec.dipaco.assignment
    if not reference.startswith(SENT):
        return spec
    file = environment.directory / "assignment.safetensors"
    with HubClient(environment.hub, environment.token, endpoint=endpoint_of(environment)) as client:
        client.get_blob(reference.removeprefix(SENT), file)
    table = dataclasses.replace(spec.dipaco, assignment=str(file))
    return dataclasses.replace(spec, dipaco=table)


def train_member(
    enrolled: JoinedJob, environment: WorkerEnvironment, spec: JobSpec, *,
    should_stop: Callable[[], bool],
) -> dict[str, Any]:  # fmt: skip
    """Train to the end or to a stop; return this member's part of the summary.

    Raises:
        AtollError: it cannot go on; see :meth:`PathTrainer.train`.
    """
    connection = enrolled.connection
    link, metrics = connection.link, metrics_outbox(connection.link)
    spec = with_assignment(spec, environment)
    states = JobModules.of(enrolled, should_stop=should_stop)
    outputs = Outputs(environment.directory, metrics.add, link.notify, connection.publish)
    try:
        member = PathMember(
            environment.member, lambda module: connection.group,
            HubTurns(link), states, outputs, should_stop,
        )  # fmt: skip
        return PathTrainer(spec, member).train()
    finally:
        states.close()
        metrics.close(timeout_s=FLUSH_TIMEOUT_S)
