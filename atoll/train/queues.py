"""Open the queues and topics of a member's job."""

from __future__ import annotations

from collections.abc import Callable

from atoll.net.endpoint import endpoint_of
from atoll.net.http.client import HubClient
from atoll.queues import HubChannel, InMemoryChannel, QueueRegistry
from atoll.train.join_job import JoinedJob


def open_queues(
    enrolled: JoinedJob | None, *, member: str, stopping: Callable[[], bool]
) -> QueueRegistry:
    """Return the queues of a member at its hub, or in-memory ones for a process without a hub.

    `enrolled` is None without a hub; `member` names its subscriptions to topics.
    """
    if enrolled is None:
        return QueueRegistry(InMemoryChannel(), prefix="alone", reader=member, stopping=stopping)
    environment = enrolled.environment
    endpoint = endpoint_of(environment)
    channel = HubChannel(
        enrolled.connection.link,
        client=lambda: HubClient(environment.hub, environment.token, endpoint=endpoint),
        scratch=environment.directory,
    )
    return QueueRegistry(channel, prefix=environment.job, reader=member, stopping=stopping)
