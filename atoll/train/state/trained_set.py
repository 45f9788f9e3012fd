"""Which parameters of a script's model its members exchange, also where that changes.

Fine-tuning often unfreezes layers during a run, or adds parameters to the optimizer. Before the
first step that trains them, the period ends with a round, so that all members hold one model. Then
the strategy is set up for the larger set; its own momentum starts anew. The set is part of the
digest by which members compare their state when they join a round: a member with another set does
not take part, but takes over the others' state with their set, or fails if it trains more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.codec.registry import make_codec
from atoll.errors import ConfigError
from atoll.group.base import Group
from atoll.strategies.base import Outer, SyncResult, extend_history_hash
from atoll.strategies.vectors.whole_state import not_synchronised, some_names
from atoll.task import Task

ONLY = "_optimizer_only"
"""Name under which parameters are kept that the optimizer has and the model has not."""


def joined_model(model: nn.Module, optimizer: Optimizer) -> nn.Module:
    """Return the model, extended by the parameters that only its optimizer has.

    The result shares the model's modules and is for its state only: it has no `forward`.
    """
    known = {id(parameter) for parameter in model.parameters()}
    only = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    if not only:
        return model
    joined, holder = nn.Module(), nn.Module()
    holder._parameters = {str(number): parameter for number, parameter in enumerate(only)}
    joined._parameters, joined._buffers = dict(model._parameters), dict(model._buffers)
    joined._non_persistent_buffers_set = set(model._non_persistent_buffers_set)
    joined._modules = {**model._modules, ONLY: holder}
    return joined


class TrainedSet:
    """The exchanged parameters of one member."""

    def __init__(
        self,
        task: Task,
        outer: Outer,
        *,
        model: nn.Module,
        group: Group,
        codec: str,
        after_round: Callable[[SyncResult], None],
    ) -> None:
        """`model` is the script's own; `after_round` takes the rounds of `renew`."""
        self.task, self._outer, self._model = task, outer, model
        self._after_round = after_round
        self._group, self._codec = group, codec
        self._note()
        task.fit = self.fit

    def renew(self) -> None:
        """Exchange parameters from now on that became trainable, after a round with the others.

        Raises:
            ConfigError: the strategy, or an island, cannot do that during a run.
        """
        if not self._changed():
            return
        task = self.task
        new = self._new()
        if not new or not self._outer.inherits:  # where members share nothing, nothing changes
            self._note()
            return
        if task.elsewhere is not None or not self._outer.can_grow:
            raise ConfigError(
                "these parameters became trainable during the run and would not be synchronised",
                given=some_names(new),
                expected="the parameters that were trainable in run.wrap(...)",
                remedy="unfreeze them before run.wrap, or use a method such as diloco or ddp",
            )
        with task.state_lock.moving():
            ended = extend_history_hash(task, self._outer.finish(task))
            self.fit(sorted({*self._names(), *new}))
        if ended is not None:
            self._after_round(ended)

    def list_apart(self, tell: Callable[[str, str], None]) -> None:
        """Report what rounds do not keep equal, if this is the first member."""
        found = not_synchronised(self.task, rounded=not self._outer.can_grow)
        if found and self._outer.inherits:
            text = f"not synchronised: {'; '.join(found)}"
            if self._group.members[:1] == (self._group.me,):
                tell("not-synchronised", text)  # is logged, too

    def fit(self, names: Sequence[str]) -> None:
        """Set the strategy up to exchange these parameters, from the model as it is.

        Raises:
            ConfigError: this member trains parameters that are not among them.
        """
        task, optimizer = self.task, self.task.optimizer
        task.model = joined_model(self._model, optimizer)
        missing = sorted({*self._names(), *self._new()} - set(names))
        if missing:
            raise ConfigError(
                "this member trains parameters that the others do not",
                given=some_names(missing),
                remedy="unfreeze parameters at the same step on every member",
            )
        task.exchange(names)
        self._outer.setup(task, group=self._group, codec=make_codec(self._codec))
        state = self._outer.state_dict()
        self._outer.load_state_dict({k: state[k] for k in state if not k.startswith(MOMENTUM)})
        self._note()

    def _note(self) -> None:
        self._stepped = self._all()
        held = {id(p): p for p in (*self._model.parameters(), *self._stepped)}
        if self.task.elsewhere is not None:  # the task has copies of an island's parameters
            self._exchanged = {key for key, p in held.items() if p.requires_grad}
        else:
            self._exchanged = {id(parameter) for parameter in self.task.parameters()}
        self._resting = [p for key, p in held.items() if key not in self._exchanged]

    def _all(self) -> list[Tensor]:
        return [p for group in self.task.optimizer.param_groups for p in group["params"]]

    def _changed(self) -> bool:
        now = self._all()
        same = len(now) == len(self._stepped) and all(map(_same, now, self._stepped))
        return not same or any(parameter.requires_grad for parameter in self._resting)

    def _new(self) -> list[str]:
        """Return the names of trainable parameters that are not exchanged."""
        named = joined_model(self._model, self.task.optimizer).named_parameters()
        return [n for n, p in named if p.requires_grad and id(p) not in self._exchanged]

    def _names(self) -> list[str]:
        named = joined_model(self._model, self.task.optimizer).named_parameters()
        return [n for n, p in named if id(p) in self._exchanged]


MOMENTUM = "shared.outer."
"""Prefix of the state of a strategy's own optimizer, which fits the smaller set only."""


def _same(one: Tensor, other: Tensor) -> bool:
    return one is other
