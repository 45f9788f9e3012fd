"""The run object on the ranks of an island other than the first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.errors import ConfigError
from atoll.group.aggregation import Aggregation, AggregationOptions
from atoll.queues import Queue, Topic
from atoll.run.member import Run
from atoll.run.place import JobPlace, Membership
from atoll.strategies.several_optimizers import as_list, one_model
from atoll.strategies.wrapped_optimizer import KEY, WrapSpec, two_moments
from atoll.train.agreement import Agreement
from atoll.train.island.script_model import RankModel, saved_model
from atoll.train.island.script_ranks import RankMessage, ScriptRanks


class RankOptimizer(WrapSpec):
    """The wrapped optimizer on a rank other than the first, whose strategy it follows."""

    def __init__(self, inner: Optimizer, *, ranks: ScriptRanks, twice: bool) -> None:
        """Wrap `inner`.

        Args:
            inner: This rank's own optimizer.
            ranks: The island.
            twice: The strategy also acts before the optimizer's step.
        """
        self._ranks, self._twice = ranks, twice
        self._skipped = False
        super().__init__(inner)

    @property
    def skipped(self) -> bool:
        """Whether the last step was not taken because gradients had overflowed."""
        return self._skipped

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one optimizer step, and follow the first rank's strategy around it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._ranks.report.overflowed = self.overflow_found
        self._skipped = self._ranks.arrive("step").overflowed
        self.unscale(overflowed=self.skipped)
        if self._twice:
            word = self._ranks.go_on()
            self._skipped = word.skipped
            if not word.midway:
                return loss  # this member was behind and has loaded the committed state
        if not self.skipped:
            self.inner.step()
        self._ranks.go_on()
        return loss

    def _state_to_save(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state; the strategy's is the first rank's."""
        return self.inner.state_dict()

    def _load_saved(self, state: dict[str, Any]) -> None:
        state.pop(KEY, None)
        self.inner.load_state_dict(state)

    def __repr__(self) -> str:
        return f"a rank's {self.inner!r}"


class FollowerRun(Run):
    """The result of `atoll.join` on an island's other ranks: the same calls, done by all ranks.

    Only the first rank has a session with the hub; this one knows what the first rank sends it.
    """

    def __init__(self, ranks: ScriptRanks, membership: Membership, *, member: str) -> None:
        """Follow the first rank, which sends slot and number of slots."""
        JobPlace.__init__(self, ranks, membership)
        self._member = member
        self._followed: RankOptimizer | None = None
        self._model: RankModel | None = None

    def _last_message(self) -> RankMessage:
        """Return the last message of the first rank.

        Raises:
            ConfigError: there is none yet.
        """
        if self._ranks.message is None:
            raise ConfigError(
                "this rank of the island has not joined the job yet",
                given=f"rank {self.rank} of {self.ranks}",
                remedy="call run.mesh, run.shard or run.wrap on every rank before",
            )
        return self._ranks.message

    @property
    def member(self) -> str:
        """Name of the member whose rank this is, e.g. `w0`."""
        return self._member

    @property
    def slot(self) -> int:
        """The member's number."""
        return self._last_message().slot

    @property
    def num_slots(self) -> int:
        """Number of members the job was started with."""
        return self._last_message().num_slots

    @property
    def members(self) -> tuple[str, ...]:
        """Members of the last round."""
        return tuple(self._last_message().members)

    @property
    def is_first(self) -> bool:
        """False: it is true on a first rank only."""
        return False

    @property
    def step(self) -> int:
        """Optimizer steps done by the group."""
        return self._ranks.message.step if self._ranks.message is not None else 0

    @property
    def takes_over(self) -> bool:
        """Whether this member continues a run: it joined late, or the job was resumed."""
        return self._last_message().takes_over

    def _leave_soon(self) -> None:
        """At the next synchronization, tell the first rank that this process was asked to leave."""
        self._ranks.report.leave_requested = True

    # ---------------------------------------------------------------------------- training

    def wrap(  # type: ignore[override]  # mypy does not match it with the overloads of Run
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        outer: str | object = "diloco",
        steps: int = 0,
        codec: str = "",
        **aggregation: Unpack[AggregationOptions],
    ) -> WrapSpec | list[WrapSpec]:
        """Return an optimizer that steps with the other ranks; see :meth:`Run.wrap`."""
        agreement = Agreement.of(
            outer, steps=steps, codec=codec, aggregation=Aggregation(**aggregation)
        )
        whole, inner = one_model(model), as_list(optimizer)
        self._ranks.meet()
        agreement.check(
            again=self._followed is not None, nodes=self.num_slots, spread=True,
            optimizers=len(inner),
        )  # fmt: skip
        self._ranks.arrive("wrap")
        self._model = RankModel(
            whole, inner[0], broadcaster=self._ranks.broadcaster, device=self.device
        )
        self._rank_state.follow(self._ranks.broadcaster)
        self._ranks.go_on()
        self._followed = RankOptimizer(
            inner[0], ranks=self._ranks, twice=two_moments(agreement.options.build())
        )
        return self._followed if isinstance(optimizer, Optimizer) else [self._followed]

    def track(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        """Do nothing: the first rank measures."""

    def stepped(self, count: int = 1) -> None:
        """Count steps of tracked training, together with the other ranks."""
        self._meet_at("track")

    def log(
        self, *, loss: float | Tensor | None = None, tokens: int = 0, **values: float | Tensor
    ) -> None:
        """Record loss and tokens of this rank's rows; other values are the first rank's."""
        self._ranks.report.add(loss=loss, tokens=tokens)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Load the agreed parameters into the model, together with the other ranks."""
        if self._followed is None:
            yield
            return
        self._meet_at("evaluating")
        yield
        self._meet_at("evaluating")

    def finish(self) -> None:
        """Synchronize the last steps, together with the other ranks."""
        self._meet_at("finish")

    def save(self, model: nn.Module, name: str = "model.safetensors") -> Path | None:
        """Let the first rank write the agreed weights."""
        saved_model(self._model, model)
        self.finish()
        self._meet_at("save")
        return None

    def _meet_at(self, place: str) -> None:
        self._ranks.arrive(place)
        self._ranks.go_on()

    # ------------------------------------------------------------------- the first rank's own

    def publish(self, path: Path, name: str) -> None:
        """Do nothing: the first rank publishes."""

    def tell(self, kind: str, text: str) -> None:
        """Do nothing: the first rank reports events."""

    def queue(self, name: str, **options: Any) -> Queue:
        """Refuse: only the first rank has a session with the hub."""
        raise self._only_the_first("queue", name)

    def topic(self, name: str, **options: Any) -> Topic:
        """Refuse: only the first rank has a session with the hub."""
        raise self._only_the_first("topic", name)

    def _only_the_first(self, kind: str, name: str) -> ConfigError:
        return ConfigError(
            f"only the first rank of an island has queues and topics: {kind} {name!r}",
            given=f"rank {self.rank} of {self.ranks}",
            remedy="use it where run.rank == 0, and send the values to the other ranks",
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None and self._ranks.met:
                self.finish()
                self._ranks.arrive("end")
                self._ranks.part()
        finally:
            self._give_signals_back()
