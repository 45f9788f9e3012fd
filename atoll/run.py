"""`atoll.join()`: take part in a job from any PyTorch script."""

from __future__ import annotations

import signal
import threading
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from atoll.checkpoint import save_weights
from atoll.clock import Clock, RealClock
from atoll.codec import make_codec
from atoll.config import WorkerEnvironment, load_spec, worker_environment
from atoll.errors import ConfigError, GroupLeft, LeftBehind
from atoll.group.alone import Alone
from atoll.group.group import Group
from atoll.group.policy import GroupPolicy
from atoll.queues import Queue, Topic
from atoll.strategies.fitting import check, named
from atoll.strategies.past import note
from atoll.strategies.strategy import SyncResult
from atoll.strategies.table import resolve_outer, without_shared_steps
from atoll.strategies.wrapped import OuterOptimizer
from atoll.task import Task
from atoll.train.deal import deal
from atoll.train.enroll import Enrolled, enroll
from atoll.train.goodbye import end_member
from atoll.train.member_result import member_result, trained
from atoll.train.script_meter import ScriptMeter
from atoll.train.shelf import open_shelf
from atoll.train.wrapped_state import WrappedState
from atoll.wire.limits import EXIT_LEFT, EXIT_REPLACED

FLUSH_TIMEOUT_S = 10.0
ALONE_SEED = 7


def join() -> Run:
    """Enter the job that this process was started for; use it as a context manager.

    Started by `atoll run`, the process becomes a member of its job. Started by hand, it is a group
    of one without a hub and everything works the same:

        with atoll.join() as run:
            optimizer = run.wrap(model, optimizer, outer=atoll.DiLoCo(every=500), codec="int8")
            for batch in run.shard(loader):
                ...

    Raises:
        HubUnreachable: the hub of the job does not answer.
        ConfigError: the environment of this process is incomplete.
    """
    environment = worker_environment()
    if environment is None:
        return Run(Alone(), slot=0, num_slots=1, directory=Path.cwd(), seed=ALONE_SEED)
    return _enter(environment)


def _enter(environment: WorkerEnvironment) -> Run:
    spec = load_spec(environment.spec)
    asked = threading.Event()
    enrolled = enroll(environment, route=spec.job.route, should_stop=asked.is_set)
    place = enrolled.connection.registered
    return Run(
        enrolled.connection.group, slot=place.slot, num_slots=place.num_slots,
        directory=environment.directory, seed=spec.job.seed, enrolled=enrolled, asked=asked,
        checkpoint_every=spec.checkpoint.every,
    )  # fmt: skip


class Run:
    """One process's part in a job; made by :func:`join`."""

    def __init__(
        self,
        group: Group,
        *,
        slot: int,
        num_slots: int,
        directory: Path,
        seed: int,
        enrolled: Enrolled | None = None,
        asked: threading.Event | None = None,
        checkpoint_every: int = 0,
        clock: Clock | None = None,
    ) -> None:
        """Take part as a member of `group`; tests pass a group in memory."""
        self.group, self.slot, self.num_slots = group, slot, num_slots
        self.job = enrolled.environment.job if enrolled is not None else "alone"
        self.directory, self.seed = directory, seed
        self._enrolled, self._every = enrolled, checkpoint_every
        self._connection = enrolled.connection if enrolled is not None else None
        self._clock: Clock = clock if clock is not None else RealClock()
        self._asked = asked if asked is not None else threading.Event()
        self._state: WrappedState | None = None
        self._before: Any = None
        self._optimizer: OuterOptimizer | None = None
        self._task: Task | None = None
        self.results: dict[str, Any] = {}  # further entries of this member's part of the summary
        self._meter = ScriptMeter(group, self._clock)
        self._shelf = open_shelf(enrolled, member=self.member, stopping=lambda: self.stopping)

    # -------------------------------------------------------------------------- where we are

    @property
    def member(self) -> str:
        """Own name in the job, e.g. `w0`."""
        return self.group.me

    @property
    def members(self) -> tuple[str, ...]:
        """Who took part in the last round; before the first one only this member is known."""
        return self.group.members or (self.group.me,)

    @property
    def is_first(self) -> bool:
        """Whether this member does what only one has to, e.g. printing."""
        return self.members[0] == self.member

    @property
    def stopping(self) -> bool:
        """Whether the job, or this process, was asked to stop: leave the loop soon."""
        return self._asked.is_set() or self._replaced or self.group.stopping

    @property
    def step(self) -> int:
        """How many optimizer steps the group has done; a member that comes late starts there."""
        return self._task.step if self._task is not None else 0

    @property
    def _replaced(self) -> bool:
        return self._enrolled is not None and self._enrolled.replaced

    # ---------------------------------------------------------------------------- training

    def wrap(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        outer: str | object = "diloco",
        codec: str = "",
        aggregate: str = "mean",
        collective: str = "auto",
        admission: str = "finite",
    ) -> OuterOptimizer:
        """Return an optimizer that keeps the members' models together; use it instead.

        Every member's parameters become those of the first member. The arguments after the first
        two MUST be the same on every member.

        Args:
            model: What is trained.
            optimizer: Your own optimizer over its parameters.
            outer: A preset (`diloco`, `local-sgd`, `ddp`, ...: `atoll methods` lists them) or
                options such as `atoll.DiLoCo(every=500)`.
            codec: What a tensor weighs on the wire, e.g. `int8`; the preset's, or fp32.
            aggregate: The rule that makes one vector of the members': `mean`, or a robust one
                such as `trimmed:1`.
            collective: How a mean travels between members that can dial each other, e.g. `ring`.
            admission: Which contributions are let in: `finite` ones, or those within `norms`.

        Raises:
            ConfigError: an unknown name, a number out of range, things that cannot work together,
                or a second call.
        """
        if self._optimizer is not None:
            raise ConfigError(
                "a run wraps one optimizer",
                given="a second call of run.wrap",
                remedy="give one optimizer all parameters, in groups",
            )
        options, name = without_shared_steps(*resolve_outer(outer, codec=codec))
        strategy = options.build()
        self.group.policy = GroupPolicy(
            aggregate=aggregate, collective=collective, admission=admission
        )
        check(named(options, name), nodes=self.num_slots, policy=self.group.policy)
        task = Task(model, optimizer, member=self.member, round=self.group.committed_round)
        self._task = task
        self._meter.open(task, self._connection, flush_timeout_s=FLUSH_TIMEOUT_S)
        strategy.setup(task, group=self.group, codec=make_codec(name))
        self._state = WrappedState(
            task, strategy, group=self.group, strategy=type(options).__name__.lower(),
            enrolled=self._enrolled, every=self._every,
        )  # fmt: skip
        self._state.begin()
        self._meter.bytes()
        self._meter.restart()
        self._optimizer = OuterOptimizer(
            optimizer, task=task, outer=strategy, after_step=self._after_step,
            recover=self._recover,
        )  # fmt: skip
        return self._optimizer

    def track(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        """Measure training that agrees with nobody; :meth:`wrap` does so by itself.

        Points flow from then on, see :meth:`log`, and :meth:`stepped` says how far it has come.
        """
        optimizer = optimizer or SGD([{"params": list(model.parameters())}], lr=0.0)  # never steps
        self._task = Task(model, optimizer, member=self.member)
        self._meter.open(self._task, self._connection, flush_timeout_s=FLUSH_TIMEOUT_S)
        self._meter.restart()

    def stepped(self, count: int = 1) -> None:
        """Count steps of tracked training; 0: none, but a point is sent if it is time."""
        if self._task is not None and self._optimizer is None:
            self._task.step += count
        self._meter.step(None)

    def shard(self, data: Any) -> Any:
        """Return this member's share of some data; all shares together are the whole.

        A `DataLoader` comes back as a loader of the own samples (shuffled if it was), a data set
        with a length as a `Subset`, anything else as an iterable of every n-th item. Loaders
        and iterables end early when the job is asked to stop. Iterables and loaders with a sampler
        of their own MUST give every member the same order.
        """
        return deal(
            data, slot=self.slot, num_slots=self.num_slots, seed=self.seed,
            should_stop=lambda: self.stopping,
        )  # fmt: skip

    def log(
        self, *, loss: float | Tensor | None = None, tokens: int = 0, **values: float | Tensor
    ) -> None:
        """Record measurements; cheap enough for every step, sent about once a second.

        Args:
            loss: Training loss of the step.
            tokens: Tokens (or samples) of the step. Members weigh by them when they agree.
            values: Anything else; the last one of a second is kept.
        """
        self._meter.log(loss=loss, tokens=tokens, values=values)

    def evaluating(self) -> AbstractContextManager[None]:
        """Put the parameters that count into the model: evaluate, and keep, what is there inside.

        Between two rounds a member is ahead of what all have agreed on; inside this block the
        model is the agreed one, afterwards it is as before. Do not train inside.
        """
        return self._optimizer.evaluating() if self._optimizer is not None else nullcontext()

    def finish(self) -> None:
        """Agree on the last steps, so that all members end with one model.

        Called by :meth:`save` and at the end of the `with` block; further calls do nothing.
        """
        while self._optimizer is not None and self._task is not None and not self._gone:
            try:
                with self._task.gate.moving():
                    sync = note(self._task, self._optimizer.outer.finish(self._task))
            except LeftBehind as error:
                self._recover(error)
            except GroupLeft:
                return
            else:
                self._note(sync)
                return

    @property
    def _gone(self) -> bool:
        """Whether this process, and not the whole job, is to end."""
        return self._asked.is_set() or self._replaced

    def _recover(self, error: LeftBehind) -> None:
        """Take the committed state over; what was done since the last round is dropped."""
        if self._state is None or self._task is None:
            raise error
        began = self._clock.monotonic()
        self._meter.totals.wasted_steps += self._task.period.done
        self._state.recover(error)
        self._meter.totals.recovery_s += self._clock.monotonic() - began

    def save(self, model: nn.Module, name: str = "model.safetensors") -> Path | None:
        """Write the agreed weights and upload them to the hub; every member MUST call this.

        Returns:
            The file, on the first member; None on the others.

        Raises:
            StorageFull: the disk is full.
        """
        self.finish()
        if not self.is_first:
            return None
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        task = self._task
        about = {"step": str(task.step), "round": str(task.round)} if task else {}
        with self.evaluating():
            save_weights(path, model.state_dict(), about=about)
        self.publish(path, name)
        return path

    def publish(self, path: Path, name: str) -> None:
        """Upload a finished file to the hub, from where it comes into `runs/JOB/`."""
        if self._connection is not None:
            self._connection.publish(path, name)

    def tell(self, kind: str, text: str) -> None:
        """Tell people that something happened; not before a model is tracked or wrapped."""
        self._meter.tell(kind, text)

    # ------------------------------------------------------------------------------ queues

    def queue(self, name: str, **options: Any) -> Queue:
        """Return a durable queue: what one puts, one other gets and acknowledges.

        Args:
            name: Without a slash it is this job's own; others must be listed in `queues` of [job].
            options: `max_items`, `max_bytes`, `overflow` (`reject`, `drop-oldest` or `wait`),
                `max_attempts`, `keep_s`; they hold for everybody from then on.

        Raises:
            AuthError: this job may not use it.
            ConfigError: there is no such option.
        """
        return self._shelf.queue(name, **options)

    def topic(self, name: str, **options: Any) -> Topic:
        """Return a durable topic, which every subscription reads for itself; see :meth:`queue`."""
        return self._shelf.topic(name, **options)

    # ------------------------------------------------------------------------------ measuring

    def _after_step(self, sync: SyncResult | None) -> None:
        """Count the time of a step, and save if a round in it says so."""
        self._meter.step(sync)
        if self._state is not None:
            self._state.after(sync)

    def _note(self, sync: SyncResult | None) -> None:
        self._meter.bytes()
        if self._state is not None:
            self._state.after(sync)

    def _result(self) -> dict[str, Any]:
        """Return this member's part of the summary."""
        totals, task, digest = self._meter.totals, self._task, ""
        result = member_result(
            member=self.member, slot=self.slot, seed=self.seed, stopped=self.stopping,
            totals=totals,
        )  # fmt: skip
        if task is not None:
            if self._optimizer is not None:
                digest = self._optimizer.outer.digest(task)
            result |= trained(task, totals=totals, digest=digest)
        return result | self.results

    # ---------------------------------------------------------------------------------- ends

    def __enter__(self) -> Run:
        """Take over SIGTERM: it makes `stopping` true and ends nothing by itself."""
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._asked.set()
        if self._enrolled is not None:
            self._enrolled.leave("this process was asked to leave")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.finish()
                self._meter.report()
            self._leave(error)
        finally:
            if self._before is not None:
                signal.signal(signal.SIGTERM, self._before)

    def _leave(self, error: BaseException | None) -> None:
        """Send what is left and say goodbye; failing to do so hides no error of the script."""
        if self._state is not None and error is None:
            self._state.close()
        self._shelf.close(timeout_s=FLUSH_TIMEOUT_S)
        self._meter.close()
        if self._connection is None or self._enrolled is None:
            self.group.close()
            return
        if error is None and self._gone and not self.group.stopping:
            # Neither done nor failed: whoever started this process is told by its exit status.
            replaced = self._replaced
            self._enrolled.close()
            raise SystemExit(EXIT_REPLACED if replaced else EXIT_LEFT)
        end_member(self._enrolled, error=error, result=self._result(), member=self.member)
