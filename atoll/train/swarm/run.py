"""What a worker runs in a job with stages: a member of the SWARM, or one with the whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from atoll.config import JobSpec, WorkerEnvironment
from atoll.group.peers.nearest import NearestChannel
from atoll.group.routes.rendezvous_store import own_address
from atoll.train.join_job import JoinedJob
from atoll.train.results.metrics import metrics_outbox
from atoll.train.results.outputs import Outputs
from atoll.train.swarm.trainer import SwarmTrainer
from atoll.train.swarm.whole import StagesOuter
from atoll.train.trainer import Trainer

if TYPE_CHECKING:
    from atoll.train.island.island_trainer import TrainerIsland

FLUSH_TIMEOUT_S = 10.0
WHOLE = -1
"""Stage of a member that holds the whole model, in its result."""


def train_member(
    enrolled: JoinedJob, environment: WorkerEnvironment, spec: JobSpec, *,
    should_stop: Callable[[], bool], island: TrainerIsland | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train to the end or to a stop; return this member's part of the summary.

    `island` are the ranks of a member with the whole model, this process being the first.

    Raises:
        AtollError: it cannot go on; see :meth:`SwarmTrainer.train` and :meth:`Trainer.train`.
    """
    connection = enrolled.connection
    link, registered = connection.link, connection.registered
    metrics = metrics_outbox(link)
    outputs = Outputs(environment.directory, metrics.add, link.notify, connection.publish)
    try:
        if registered.slot < spec.swarm.whole:
            return _train_whole(enrolled, spec, outputs, should_stop, island)
        relayed = environment.relayed or spec.job.route == "relay"
        channel = NearestChannel(
            link, job=environment.job, me=environment.member,
            lines=connection.group.lines if not relayed else None,
            address="" if relayed else own_address(environment.hub),
        )  # fmt: skip
        try:
            return SwarmTrainer(
                spec, enrolled, channel=channel, outputs=outputs, should_stop=should_stop
            ).train()
        finally:
            channel.close()
    finally:
        metrics.close(timeout_s=FLUSH_TIMEOUT_S)


def _train_whole(
    enrolled: JoinedJob, spec: JobSpec, outputs: Outputs, should_stop: Callable[[], bool],
    island: TrainerIsland | None,
) -> dict[str, Any]:  # fmt: skip
    """Train the whole model with the built-in trainer, on data of its own."""
    connection = enrolled.connection
    trainer = Trainer(
        spec, group=connection.group, outputs=outputs, island=island,
        outer=StagesOuter.of(spec, enrolled, should_stop=should_stop),
    )  # fmt: skip
    start = msgspec.structs.replace(
        connection.registered, num_slots=spec.swarm.whole + 1, lease=None, resume_round=-1
    )
    return trainer.train(start, should_stop) | {"stage": WHOLE}
