"""An outer method over the parameters of one stage, among the members that serve it.

Each member steps its optimizer with the sum of what it computed itself. Every so many steps the
members of a stage meet in a round, as replicas of an ordinary job do: a stage is their model.

Differs from an ordinary job: weights are the same from the seed, so nothing is broadcast at the
start; and no first steps are computed on the same data.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

from torch import Tensor

from atoll.checkpoint.stages import OuterNames
from atoll.codec.registry import make_codec
from atoll.group.base import Group
from atoll.strategies.base import Outer, SyncResult, Traffic, extend_history_hash
from atoll.strategies.inner.swarm.stage import ModelStage
from atoll.strategies.outer.periodic import PeriodicOuter
from atoll.strategies.resolve import Resolved, without_shared_steps
from atoll.strategies.vectors.flat import Flat
from atoll.task import Task

START = "shared.start"
"""Key of the common parameters in the state of an outer method."""


class StageOuter:
    """The outer method of one member, for the stage that it serves now."""

    def __init__(self, resolved: Resolved, *, group: Group, task: Task, stage: ModelStage) -> None:
        """Take the present parameters of `task`'s model as what its members agreed on last."""
        method, codec = without_shared_steps(resolved.method, resolved.codec)
        self._outer: Outer = method.build()
        self._task = task
        names = {id(t): name for name, t in {**stage.parameters(), **stage.buffers()}.items()}
        tensors = [*task.parameters(), *task.buffers()]
        self._names = OuterNames(
            stage.number,
            {names.get(id(t), f"{stage.number}.{place}"): t for place, t in enumerate(tensors)},
        )
        self._flat = Flat.of(task)
        self._outer.setup(task, group=group, codec=make_codec(codec))
        self.load({})

    def tensors(self) -> dict[str, Tensor]:
        """Return what a member that is new to the stage needs, by name; nothing is copied."""
        return self._names.named(self._outer.shared_state())

    @property
    def start(self) -> Tensor:
        """What the members agreed on last, as one vector; not copied."""
        return self._outer.shared_state()[START]

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Start from what the members of the stage agreed on last: parameters and momentum.

        Other tensors than those of this stage's outer method are left alone. Without any, from the
        present parameters.
        """
        self._outer.load_state_dict({START: self._flat.read()} | self._names.state_in(tensors))
        self._outer.rejoin(self._task)

    def restore(self) -> None:
        """Give the model what the members agreed on last, and count steps from here."""
        self._outer.rejoin(self._task)

    def digest(self) -> str:
        """Return the digest of what the members agreed on last."""
        return self._outer.committed(self._task).base

    def meet(self) -> SyncResult | None:
        """Meet the other members if a round is due; return it.

        Raises:
            LeftBehind: the others went on without this member.
            GroupLeft: this member leaves.
        """
        result = self._outer.sync(self._task)
        extend_history_hash(self._task, result)
        return result

    def evaluating(self) -> AbstractContextManager[None]:
        """Load the parameters on which the stage agrees for the block, if they are others."""
        return self._outer.evaluating(self._task)

    def finish(self) -> SyncResult | None:
        """Meet after the last step, if steps are left since the last round; raises as `meet`."""
        result = self._outer.finish(self._task)
        extend_history_hash(self._task, result)
        return result

    def take_back(self) -> None:
        """Load what the members of the stage agreed on last into the model."""
        self._outer.rejoin(self._task)

    def begin_now(self) -> None:
        """Count this member's time from now: it was held up by something else than its steps."""
        if isinstance(self._outer, PeriodicOuter):
            self._outer.begin_now()

    def traffic(self, elements: int, peers: int, *, steps: int, rank: int = 0) -> Traffic:
        """Return a member's traffic; see :meth:`Outer.traffic`."""
        return self._outer.traffic(elements, peers, steps=steps, rank=rank)
