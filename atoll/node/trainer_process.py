"""The built-in trainer in the process of a member, or in rank 0 of an island that may morph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from atoll.config import JobSpec, RankPlace, WorkerEnvironment
from atoll.island.morph_orders import MorphOrder, Moved, Orders
from atoll.island.start_phase import StartReport
from atoll.net.sync_link import SyncLink
from atoll.node.islands.moved import moved
from atoll.train.join_job import JoinedJob
from atoll.wire.messages import Event, Point, Registered

if TYPE_CHECKING:
    from atoll.checkpoint import BackgroundSaver, Store
    from atoll.node.worker import LeaveRequested
    from atoll.train.island.island_trainer import TrainerIsland
    from atoll.train.trainer import Trainer

FLUSH_TIMEOUT_S = 10.0
SAVE_TIMEOUT_S = 120.0
"""How long the end of a run waits for its last checkpoint."""

LEAVE_SAVE_S = 3.0
"""The same when the machine goes away."""


def train(
    enrolled: JoinedJob,
    environment: WorkerEnvironment,
    spec: JobSpec,
    leave: LeaveRequested,
    *,
    place: RankPlace | None,
    start: StartReport,
    orders: Orders | None = None,
) -> dict[str, Any]:
    """Train until the end or a stop; return this member's part of the summary.

    The first rank of an elastic island survives the loss of others: it takes part in the next mesh
    with the state of the other members, or of the newest checkpoint. When it is ordered to another
    mesh and nothing is lost, it takes its own state along, after a round.
    """
    if spec.tune.active:
        from atoll.train.tuning_data import with_examples

        spec = with_examples(spec, environment)
    if spec.swarm.stages:
        from atoll.train.swarm.run import train_member

        def should_stop() -> bool:
            return leave.requested or enrolled.replaced

        if place is None:
            return train_member(enrolled, environment, spec, should_stop=should_stop)
        from atoll.train.island.island_trainer import leading

        with leading(spec, place=place, start=start, orders=Orders()) as island:
            return train_member(enrolled, environment, spec, should_stop=should_stop, island=island)
    if spec.dipaco.modules:
        from atoll.train.paths import run as paths

        return paths.train_member(
            enrolled, environment, spec, should_stop=lambda: leave.requested or enrolled.replaced
        )
    with _metrics(enrolled.connection.link, spec, environment) as metrics:
        member = _Member(enrolled, environment, leave, metrics)
        if place is None or orders is None:
            return member.train(None, spec, enrolled.connection.registered)
        return _lead(member, spec, orders, place=place, start=start)


def _lead(
    member: _Member, spec: JobSpec, orders: Orders, *, place: RankPlace, start: StartReport
) -> dict[str, Any]:
    """Train as the first rank of an island, in one mesh after the other."""
    from atoll.train.island.island_trainer import leading
    from atoll.train.state.saving import carried

    environment, enrolled = member.environment, member.enrolled
    registered, store = enrolled.connection.registered, None
    while True:
        order: MorphOrder | None = None
        try:
            with leading(spec, place=place, start=start, orders=orders) as island:
                return member.train(island, spec, registered, carried=store)
        except Moved as moving:
            order = orders.take(moving.order.number)
            if order is None:
                raise
            store = carried(environment.directory, round_=moving.round)
            resume, text = moving.round, f"{environment.member} goes on in another mesh"
        except BaseException as error:
            if not (member.leave.requested or enrolled.replaced):
                order = orders.after(error)
            if order is None:
                raise
            member.drop_saver()
            store, text = None, f"{environment.member} has lost a rank, the others go on"
        place, spec, start = moved(order, environment)
        enrolled.connection.link.notify(Event("morphed", f"{text}: {spec.mesh}"))
        if store is None:
            # The state is that of the other members, or the newest checkpoint.
            registered = msgspec.structs.replace(registered, recover=True, resume_round=-1)
        else:
            registered = msgspec.structs.replace(
                registered, recover=False, resume_round=resume, lease=None
            )


@contextlib.contextmanager
def _metrics(
    link: SyncLink, spec: JobSpec, environment: WorkerEnvironment
) -> Iterator[Callable[[Point], None]]:
    """Yield a function that sends a member's measurements to the hub and the job's loggers."""
    from atoll.train.results.loggers import open_loggers
    from atoll.train.results.metrics import metrics_outbox

    loggers = open_loggers(
        spec.log, environment.directory, job=environment.job, member=environment.member
    )
    metrics = metrics_outbox(link)
    try:
        yield loggers.before(metrics.add)
    finally:
        metrics.close(timeout_s=FLUSH_TIMEOUT_S)
        loggers.close()


class _Member:
    """What a member keeps while the ranks of its island change their mesh."""

    def __init__(
        self,
        enrolled: JoinedJob,
        environment: WorkerEnvironment,
        leave: LeaveRequested,
        metrics: Callable[[Point], None],
    ) -> None:
        self.enrolled, self.environment, self.leave = enrolled, environment, leave
        self._metrics = metrics
        self._saver: BackgroundSaver | None = None

    def train(
        self,
        island: TrainerIsland | None,
        spec: JobSpec,
        registered: Registered,
        *,
        carried: Store | None = None,
    ) -> dict[str, Any]:
        """Train in one mesh; return this member's part of the summary."""
        from atoll.train.results.outputs import Outputs
        from atoll.train.state.saving import Saving
        from atoll.train.trainer import Trainer

        connection, leave = self.enrolled.connection, self.leave
        saver = self._saver = self._saver or self.enrolled.saver()
        store = self.enrolled.store()
        moves = False
        try:
            trainer = Trainer(
                spec,
                group=connection.group,
                outputs=Outputs(
                    self.environment.directory, self._metrics, connection.link.notify,
                    connection.publish,
                ),
                saving=Saving(store, saver, carried),
                recovery=self.enrolled.recovery,
                island=island,
            )  # fmt: skip
            with self._duty(spec, trainer, slots=registered.num_slots):
                result = trainer.train(
                    registered, lambda: leave.requested or self.enrolled.replaced
                )
            saver.close(timeout_s=LEAVE_SAVE_S if leave.requested else SAVE_TIMEOUT_S)
            return result
        except Moved:
            moves = True
            raise
        finally:
            if not moves:
                self.drop_saver()
            store.close()

    @contextlib.contextmanager
    def _duty(self, spec: JobSpec, trainer: Trainer, *, slots: int) -> Iterator[None]:
        """Do this member's share of verifying the others meanwhile, if the job is audited."""
        if spec.job.trust != "audit":
            yield
            return
        from atoll.train.verification.duty import VerificationDuty

        duty = VerificationDuty(
            self.enrolled.connection.link, self.environment, num_slots=slots,
            witness=lambda: trainer.witness,
        )  # fmt: skip
        try:
            yield
        finally:
            duty.close()

    def drop_saver(self) -> None:
        """Give up what is still being saved."""
        if self._saver is not None:
            self._saver.abandon()
        self._saver = None
