"""A member's run object: of a single process, or of the first rank of an island."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack, overload

from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from atoll.checkpoint import save_weights
from atoll.clock import Clock
from atoll.codec import make_codec
from atoll.config import CheckpointTable
from atoll.errors import GroupLeft, LeftBehind
from atoll.group.aggregation import Aggregation, AggregationOptions
from atoll.group.base import Group
from atoll.island.peer_failure import is_peer_failure
from atoll.run.collectives import CollectiveSession
from atoll.run.place import Membership
from atoll.run.placement import watch_placement
from atoll.strategies.base import SyncResult, extend_history_hash
from atoll.strategies.several_optimizers import PartOptimizer, as_list, joint, one_model
from atoll.strategies.vectors.whole_state import plain_state, report
from atoll.strategies.wrapped_optimizer import OuterOptimizer, WrapSpec
from atoll.task import Task
from atoll.train.agreement import Agreement
from atoll.train.island.script_leader import ScriptLeader, is_spread
from atoll.train.island.script_ranks import RankMessage, ScriptRanks
from atoll.train.join_job import JoinedJob
from atoll.train.results import data_account
from atoll.train.results.result import end_member, run_result, trained
from atoll.train.state.trained_set import TrainedSet, joined_model
from atoll.train.state.wrapped_state import WrappedState
from atoll.wire.limits import EXIT_LEFT, EXIT_REPLACED

if TYPE_CHECKING:
    from atoll.train.island.script_model import RankModel

FLUSH_TIMEOUT_S = 10.0


class Run(CollectiveSession):
    """One process's connection to the job; made by :func:`join`.

    If several processes form one member, each has one; some calls must then be made by all of them.
    """

    def __init__(
        self,
        group: Group,
        membership: Membership,
        *,
        enrolled: JoinedJob | None = None,
        leave_requested: threading.Event | None = None,
        saving: CheckpointTable | None = None,
        clock: Clock | None = None,
        ranks: ScriptRanks | None = None,
    ) -> None:
        """Join as a member of `group`; tests pass a group in memory."""
        super().__init__(
            group, membership, ranks=ranks if ranks is not None else ScriptRanks.alone(),
            enrolled=enrolled, leave_requested=leave_requested, clock=clock,
        )  # fmt: skip
        self._ranks.make_message = self._word
        self._saving = saving
        self._state: WrappedState | None = None
        self._changed = enrolled is not None and enrolled.late
        self._optimizer: OuterOptimizer | None = None
        self._task: Task | None = None
        self._leading = ScriptLeader(self._ranks, meter=self._meter, on_leave=self._leave_soon)
        self._model: RankModel | None = None

    # -------------------------------------------------------------------------- progress

    @property
    def step(self) -> int:
        """Optimizer steps done by the group; a joining member starts there."""
        return self._task.step if self._task is not None else 0

    def _word(self) -> RankMessage:
        """Return the message for the other ranks."""
        return RankMessage(
            member=self.member, members=list(self.members), slot=self.slot,
            num_slots=self.num_slots, step=self.step, stopping=self._stop_requested,
            unsettled=self._members_changed, takes_over=self.takes_over,
        )  # fmt: skip

    @property
    def _is_unsettled(self) -> bool:
        return super()._is_unsettled if self._joint else self._members_changed

    @property
    def _members_changed(self) -> bool:
        goes_on = self._optimizer is not None and self._optimizer.outer.goes_on
        return goes_on and self._changed and not self._gone

    # ---------------------------------------------------------------------------- training

    @overload
    def wrap(
        self, model: nn.Module, optimizer: Optimizer, *, outer: str | object = ...,
        steps: int = ..., codec: str = ..., **aggregation: Unpack[AggregationOptions],
    ) -> WrapSpec: ...  # fmt: skip

    @overload
    def wrap(
        self, model: nn.Module | Sequence[nn.Module], optimizer: Sequence[Optimizer], *,
        outer: str | object = ..., steps: int = ..., codec: str = ...,
        **aggregation: Unpack[AggregationOptions],
    ) -> list[WrapSpec]: ...  # fmt: skip

    def wrap(
        self, model: nn.Module | Sequence[nn.Module], optimizer: Optimizer | Sequence[Optimizer], *,
        outer: str | object = "diloco", steps: int = 0, codec: str = "",
        **aggregation: Unpack[AggregationOptions],
    ) -> WrapSpec | list[WrapSpec]:  # fmt: skip
        """Return an optimizer that synchronizes the members' models; use it instead of `optimizer`.

        All members start from the first one's parameters and buffers, also frozen ones. The
        arguments after the first two MUST be the same on every member. In an island every rank
        calls it with its part of one model, and only methods that synchronize parameters work.

        Several models and optimizers (e.g. of a GAN) form one replica: give all in one call, in the
        order in which the loop steps them. A step of the last one counts, in `run.step` and until
        the next round, which combines all models. Methods that combine gradients are refused.

        Args:
            model: What is trained; it may be sharded over the ranks by `fully_shard`, tensor
                parallelism or DDP. Or several models.
            optimizer: Your own optimizer over its parameters. Or several: then a list is returned.
            outer: A preset (`diloco`, `local-sgd`, `ddp`, ...: `atoll methods` lists them) or
                options such as `atoll.DiLoCo(every=500)`.
            steps: `run.step` at the loop's end, if known: then presets choose their options by it,
                and methods that hide rounds hide the last one. A loop may still end elsewhere.
            codec: Encoding of tensors on the wire, e.g. `int8`; empty: the preset's, or fp32.
            aggregation: `aggregate`, how vectors are combined: `mean`, or a robust rule, e.g.
                `trimmed:1`. `collective`: algorithm of a mean between members that can connect
                directly, e.g. `ring`. `admission`: `finite` contributions, or those in `norms`.

        Raises:
            ConfigError: an unknown name, a wrong number, parts that do not fit, or a second call.
        """
        how = Aggregation(**aggregation)
        agreement = Agreement.of(outer, steps=steps, codec=codec, aggregation=how)
        whole, inner = one_model(model), as_list(optimizer)
        self._joint = self._joint or is_spread(whole)
        if self._joint:
            self._ranks.meet()
        agreement.check(
            again=self._optimizer is not None, nodes=self.num_slots, spread=self._joint,
            optimizers=len(inner),
        )  # fmt: skip
        with self._at("wrap"):
            self._optimizer = self._wrapped(whole, inner, agreement)
        if isinstance(optimizer, Optimizer):
            return self._optimizer
        task = self._optimizer.task
        return [*(PartOptimizer(part, task=task) for part in inner[:-1]), self._optimizer]

    def _wrapped(
        self, model: nn.Module, optimizers: list[Optimizer], agreement: Agreement
    ) -> OuterOptimizer:
        """Return the last optimizer with the strategy around its step."""
        self.group.aggregation, strategy = agreement.aggregation, agreement.options.build()
        task = self._task = self._task_of(model, joint(optimizers))
        self._meter.open(task, self._connection, flush_timeout_s=FLUSH_TIMEOUT_S)
        task.stretch, task.last = self._rank_state, agreement.steps
        strategy.setup(task, group=self.group, codec=make_codec(agreement.codec))
        self._state = WrappedState(
            task, strategy, group=self.group, strategy=agreement.name,
            enrolled=self._enrolled, table=self._saving, rank_states=self._rank_state,
        )  # fmt: skip
        trained = TrainedSet(
            task, strategy, model=model, group=self.group, codec=agreement.codec,
            after_round=self._note,
        )  # fmt: skip
        self._state.begin()
        trained.list_apart(self._meter.tell)
        watch_placement(model, lambda: self.device, self._meter.tell)
        self._meter.bytes()
        self._meter.restart()
        return OuterOptimizer(
            optimizers[-1], task=task, outer=strategy, after_step=self._after_step,
            recover=self._recover, others=self._leading if self._joint else None,
            before_step=trained.renew,
        )  # fmt: skip

    def _task_of(self, model: nn.Module, optimizer: Optimizer) -> Task:
        """Return the strategies' task: of the model, or of its host model."""
        round_ = self.group.committed_round
        if not self._joint:
            return Task(joined_model(model, optimizer), optimizer, member=self.member, round=round_)
        found = self._leading.task_of(model, optimizer, member=self.member, round_=round_)
        self._model, task = found
        self._rank_state.follow(self._ranks.broadcaster)
        return task

    def _at(self, place: str) -> AbstractContextManager[None]:
        """Run the block together with the other ranks, if there are any."""
        return self._leading.at(place) if self._joint else nullcontext()

    def track(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        """Measure training that is not synchronized; :meth:`wrap` includes this.

        Points are sent from then on, see :meth:`log`; :meth:`stepped` reports the progress.
        """
        optimizer = optimizer or SGD([{"params": list(model.parameters())}], lr=0.0)  # never steps
        self._task = Task(model, optimizer, member=self.member)
        self._meter.open(self._task, self._connection, flush_timeout_s=FLUSH_TIMEOUT_S)
        self._meter.restart()

    def stepped(self, count: int = 1) -> None:
        """Count steps of tracked training; with 0 only a due point is sent."""
        with self._at("track"):
            if self._task is not None and self._optimizer is None:
                self._task.step += count
            self._meter.step(None)

    def log(
        self, *, loss: float | Tensor | None = None, tokens: int = 0, **values: float | Tensor
    ) -> None:
        """Record measurements; cheap enough for every step, sent about once a second.

        Args:
            loss: Training loss of the step; in an island, the mean over the ranks that pass one.
            tokens: Tokens (or samples) of the step, by which members are weighted. Each rank of an
                island passes those of its own rows.
            values: Any others; the last one of each second is kept, in an island the first rank's.
        """
        if self._joint:
            self._ranks.report.add(loss=loss, tokens=tokens)
            loss, tokens = None, 0
        self._meter.log(loss=loss, tokens=tokens, values=values)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Load the agreed parameters into the model and restore it on exit, to evaluate or save.

        Between two rounds a member trains ahead of the agreed model. Do not train inside. In an
        island every rank enters the block.
        """
        agreed = self._optimizer.evaluating() if self._optimizer is not None else nullcontext()
        if self._optimizer is None or not self._joint:
            with agreed:
                yield
            return
        with self._at("evaluating"):
            agreed.__enter__()
        yield  # an error inside ends the island
        with self._at("evaluating"):
            agreed.__exit__(None, None, None)

    def finish(self) -> None:
        """Synchronize the last steps, so that all members end with one model.

        Called by :meth:`save` and at the end of the `with` block; further calls do nothing. In an
        island every rank calls it.
        """
        with self._at("finish"):
            self._agree_on_the_last()

    def _agree_on_the_last(self) -> None:
        while self._optimizer is not None and self._task is not None and not self._gone:
            try:
                with self._task.state_lock.moving():
                    sync = extend_history_hash(self._task, self._optimizer.outer.finish(self._task))
            except LeftBehind as error:
                self._recover(error)
            except GroupLeft:
                return
            else:
                self._note(sync)
                if sync is None or not sync.more:
                    return

    def _recover(self, error: LeftBehind) -> None:
        """Load the committed state; steps since the last round are dropped."""
        if self._state is None or self._task is None:
            raise error
        began = self._clock.monotonic()
        self._changed = True
        self._meter.totals.wasted_steps += self._task.period.done
        self._state.recover(error)
        self._meter.totals.recovery_s += self._clock.monotonic() - began

    def save(self, model: nn.Module, name: str = "model.safetensors") -> Path | None:
        """Write the agreed weights and upload them to the hub; every member MUST call this.

        In an island every rank calls it, with the wrapped model; one whole file is written.

        Returns:
            The file, on the first member (and its first rank); None on the others.

        Raises:
            StorageFull: the disk is full.
            ConfigError: in an island, it is another model than the one that was wrapped.
        """
        if self._joint:
            from atoll.train.island.script_model import saved_model

            model = saved_model(self._model, model).whole
        self.finish()
        path = self.directory / name
        with self._at("save"):
            if not self.is_first:
                return None
            self._write(path, model)
        self.publish(path, name)
        return path

    def _write(self, path: Path, model: nn.Module) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        task = self._task
        about = {"step": str(task.step), "round": str(task.round)} if task else {}
        with self._optimizer.evaluating() if self._optimizer is not None else nullcontext():
            if task is not None:
                task.pull()
            save_weights(path, plain_state(model), about=about)

    # ------------------------------------------------------------------------------ measuring

    def _after_step(self, sync: SyncResult | None) -> None:
        """Measure a step's time, and save if its round requires it."""
        self._meter.totals.samples_given = self._rank_state.samples_given
        if sync is not None and self._task is not None:
            self._rank_state.check_orders(self._task.leases)
            self._changed |= 0 < self._task.leased < self.num_slots
        self._meter.step(sync)
        if self._state is not None:
            self._state.after(sync)

    def _note(self, sync: SyncResult | None) -> None:
        self._meter.bytes()
        if self._state is not None:
            self._state.after(sync)

    def _result(self, *, broken: bool = False) -> dict[str, Any]:
        """Return this member's part of the summary; if `broken`, no sharded model is read."""
        totals, task = self._meter.totals, self._task
        result = run_result(
            member=self.member, slot=self.slot, seed=self.seed,
            reason="asked to stop" if self.stopping else "", totals=totals,
        )  # fmt: skip
        if task is not None:
            result |= trained(task, totals=totals)
            if self._optimizer is not None and not (broken and self._joint):
                result |= report(task)
            result[data_account.KEY] = self._rank_state.account(task.leases)
        return result | self.results

    # ---------------------------------------------------------------------------------- ends

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        try:
            try:
                result = self._come_to_the_end() if error is None else self._result(broken=True)
            except BaseException as failed:
                self._leave(failed, self._result(broken=True))
                raise
            self._leave(error, result)
        finally:
            self._give_signals_back()

    def _come_to_the_end(self) -> dict[str, Any]:
        """Synchronize for the last time, release the other ranks and return the result."""
        if self._ranks.met or not self._joint:
            self.finish()
            self._meter.report()
        if not self._ranks.met:
            return self._result()
        self._ranks.arrive("end")
        result = self._result()
        self._ranks.part()
        return result

    def _leave(self, error: BaseException | None, result: dict[str, Any]) -> None:
        """Send the remaining data and leave; an error here does not hide an error of the script."""
        if error is not None and is_peer_failure(error):
            return  # its supervisor reports which rank is lost
        if self._state is not None and error is None:
            self._state.close()
        self._close_queues(timeout_s=FLUSH_TIMEOUT_S)
        self._meter.close()
        if self._connection is None or self._enrolled is None:
            self.group.close()
            return
        if error is None and self._gone and not self.group.stopping:
            # Neither done nor failed: the parent process learns it from the exit status.
            replaced = self._replaced
            self._enrolled.close()
            raise SystemExit(EXIT_REPLACED if replaced else EXIT_LEFT)
        end_member(self._enrolled, error=error, result=result)
