"""The modules that a member holds, and what its paths make of them.

The member has the parameters of one path. A module of a level takes the place of another one there;
of every module that it holds, the member keeps what its holders agreed on last (parameters and
outer momentum). Each is a part of the model with an outer method of its own, as the stage of a
SWARM is, and its holders meet in the rounds of a group of its own.

A member that trained several paths through a module brings the weighted mean of what they made of
it, with the sum of their weights: the module's mean does not depend on which member trained which
path.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from atoll.checkpoint import Part
from atoll.errors import ConfigError, GroupError, GroupLeft, HubError
from atoll.group.base import Group
from atoll.paths.layout import PathLayout
from atoll.strategies.base import SyncResult
from atoll.strategies.inner.swarm.stage import ModelStage, StageCut
from atoll.strategies.outer.periodic import PeriodicOuter
from atoll.strategies.resolve import Resolved, without_shared_steps
from atoll.strategies.vectors.flat import Flat
from atoll.task import Task
from atoll.train.swarm.outer import StageOuter

log = logging.getLogger(__name__)

MOST_FAILED = 8
"""Phases without any round after which a member gives up."""


@dataclass(slots=True)
class Level:
    """The place of a level's modules in the model."""

    stage: ModelStage
    flat: Flat
    first: Tensor
    """Its parameters as they follow from the seed: those of every module of this level."""


@dataclass(slots=True)
class Trained:
    """A module after this phase's training: the mean over this member's paths."""

    weight: float = 0.0
    mean: Tensor | None = None
    """Of the parameters after training, by weight."""

    def add(self, vector: Tensor, weight: float) -> None:
        """Add a path; a single one stays as it is, bit for bit."""
        self.weight += weight
        if self.mean is None:
            self.mean = vector
        else:
            self.mean.lerp_(vector, weight / self.weight)


@dataclass(slots=True)
class Held:
    """A module that this member holds."""

    task: Task
    outer: StageOuter
    version: int = 0
    """See `PathTurn.versions`."""
    trained: Trained = field(default_factory=Trained)

    @property
    def start(self) -> Tensor:
        """What its holders agreed on last; not copied."""
        return self.outer.start


def _prefix(module: int) -> str:
    """Return the prefix of the names in a module's state."""
    return f"module.{module}/"


def phase_steps(resolved: Resolved, *, steps: int) -> list[int]:
    """Return the step at which each phase begins, and that at which the run ends.

    Raises:
        ConfigError: the outer method has no fixed rounds.
    """
    outer = without_shared_steps(resolved.method, resolved.codec)[0].build()
    if not isinstance(outer, PeriodicOuter):
        raise ConfigError(
            "the paths through a module need an outer method with rounds at fixed steps",
            given=f"outer = {resolved.outer!r}", expected='"diloco" or "average"',
        )  # fmt: skip
    found = [0]
    while found[-1] < steps:
        found.append(min(outer.next_due(found[-1]), steps))
    return found


class HeldModules:
    """See the module's docstring."""

    def __init__(
        self, task: Task, layout: PathLayout, *, resolved: Resolved,
        group_of: Callable[[int], Group], rescaled: bool = False,
    ) -> None:  # fmt: skip
        """Cut the task's model, which has the weights of the start, at the same places everywhere.

        `rescaled`: a module's outer gradient is multiplied by the root of the paths through it.

        Raises:
            ConfigError: the model cannot be cut into that many levels.
        """
        self._task, self.layout, self._resolved = task, layout, resolved
        self._group_of, self._rescaled = group_of, rescaled
        cut = StageCut(stages=layout.levels, parts="levels")
        device = next(task.model.parameters()).device
        self._levels = []
        for number in range(layout.levels):
            stage = ModelStage(task.model, number, cut, device=device)
            flat = Flat.of(Task(stage.module, task.optimizer, state_lock=task.state_lock))
            self._levels.append(Level(stage, flat, flat.read()))
        self._held: dict[int, Held] = {}
        self._failed = 0
        self.phase = -1
        """The phase that this member is ready for, or in; -1: it has had no turn."""

    # -------------------------------------------------------------------------- holding

    def held(self) -> dict[int, int]:
        """Return the modules held, and the rounds of each."""
        return {module: held.task.round for module, held in sorted(self._held.items())}

    def versions(self) -> dict[int, int]:
        """Return the version of each module held."""
        return {module: held.version for module, held in sorted(self._held.items())}

    def forget(self, *, but: Iterable[int] = ()) -> None:
        """Hold no modules but these."""
        kept = set(but)
        self._held = {module: held for module, held in self._held.items() if module in kept}

    def keep(self, module: int, *, step: int) -> None:
        """Continue at `step` with a module that is held."""
        self._held[module].task.step = step

    def take(
        self, module: int, tensors: Mapping[str, Tensor] | None, *, step: int, round_: int,
        version: int = 0,
    ) -> None:  # fmt: skip
        """Hold a module after `round_` rounds, with the state in `tensors`; None: the initial one.

        Raises:
            ConfigError: the tensors are of another model.
        """
        level = self._levels[self.layout.level_of(module)]
        task = self._task
        level.flat.write(level.first)
        own = Task(
            level.stage.module, task.optimizer, member=task.member, last=task.last,
            state_lock=task.state_lock, group=module,
        )  # fmt: skip
        own.step, own.round = step, round_
        group = self._group_of(module)
        outer = StageOuter(self._resolved, group=group, task=own, stage=level.stage)
        if tensors is not None:
            named = tensors.items()
            prefix = _prefix(module)
            outer.load({n.removeprefix(prefix): t for n, t in named if n.startswith(prefix)})
        self._held[module] = Held(own, outer, version)

    def tensors(self, module: int) -> dict[str, Tensor]:
        """Return the state of a module by name; nothing is copied."""
        state = self._held[module].outer.tensors()
        return {_prefix(module) + name: tensor for name, tensor in state.items()}

    def digests(self) -> dict[int, str]:
        """Return the digest of each module held."""
        return {module: held.outer.digest() for module, held in sorted(self._held.items())}

    # ------------------------------------------------------------------------- training

    def load(self, path: int) -> None:
        """Give the model the agreed parameters of a path's modules."""
        for module in self.layout.modules_of(path):
            self._held[module].outer.restore()

    def collect(self, path: int, *, weight: float) -> None:
        """Add a path's trained parameters to the means of its modules, with this weight."""
        for module in self.layout.modules_of(path):
            level = self._levels[self.layout.level_of(module)]
            self._held[module].trained.add(level.flat.read(), weight)

    def drop(self) -> None:
        """Forget what was trained in this phase."""
        for held in self._held.values():
            held.trained = Trained()

    def meet(self, *, step: int, last: bool) -> list[SyncResult]:
        """Meet the other holders of each module that was trained, one module after the other.

        A module whose holders went on without this member is no longer held.

        Raises:
            GroupLeft: this member leaves.
            GroupError, HubError: no round succeeded in several phases.
        """
        found, trouble = [], None
        for module, held in sorted(self._held.items()):
            if held.trained.mean is None:
                continue
            try:
                result = self._meet(module, held, step=step, last=last)
            except GroupLeft:
                raise
            except (GroupError, HubError) as error:
                log.warning("%s missed the round of module %s: %s", held.task.member, module, error)
                del self._held[module]
                trouble = error
            else:
                found += [result] if result is not None else []
            held.trained = Trained()
        self._failed = self._failed + 1 if trouble is not None and not found else 0
        if trouble is not None and self._failed >= MOST_FAILED:
            raise trouble
        return found

    def _meet(self, module: int, held: Held, *, step: int, last: bool) -> SyncResult | None:
        trained, own = held.trained, held.task
        if trained.mean is None:
            return None
        through = len(self.layout.paths_through(module))
        if self._rescaled and through > 1:
            trained.mean = torch.lerp(held.start, trained.mean, math.sqrt(through))
        self._levels[self.layout.level_of(module)].flat.write(trained.mean)
        own.period.done = step - own.step
        own.step = step
        # Whole numbers are added exactly, in whatever order members are counted.
        own.tokens += max(1, round(trained.weight))
        return held.outer.finish() if last else held.outer.meet()

    # ---------------------------------------------------------------------- for donors

    def number_of(self, module: int, round_: int) -> int:
        """Return the number by which others ask for a module as of a round."""
        return round_ * self.layout.num_modules + module

    def state(self, number: int) -> HeldState:
        """Return what others may take over under a number."""
        held = self._held.get(number % self.layout.num_modules)
        if held is None or self.number_of(held.task.group, held.task.round) != number:
            return HeldState(-1, "", {})
        return HeldState(number, held.outer.digest(), self.tensors(held.task.group))


@dataclass(frozen=True, slots=True)
class HeldState:
    """A module for members that take it over, see :class:`~atoll.recovery.StateOf`."""

    round: int
    """Its number; -1: it is not held as of that round."""
    base: str
    tensors: Mapping[str, Tensor]
    identical: bool = True

    def parts(self) -> tuple[Part, Part]:
        """Return the module; members have nothing of their own to give."""
        return Part("module", dict(self.tensors), {}), Part("inner", {})
