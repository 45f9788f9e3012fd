"""The synchronization settings of `run.wrap`, checked before a script trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from atoll.errors import ConfigError
from atoll.group.policy import GroupPolicy
from atoll.strategies.compatibility import check
from atoll.strategies.resolve import Resolved, resolve_outer, without_shared_steps


@dataclass(frozen=True, slots=True)
class Agreement:
    """The options of an outer strategy, a codec and the group's policy."""

    options: Any
    codec: str
    policy: GroupPolicy

    @classmethod
    def of(
        cls, outer: str | object, *, codec: str, aggregate: str, collective: str, admission: str
    ) -> Agreement:
        """Parse the arguments of `run.wrap`.

        Raises:
            ConfigError: a name is unknown, or a number is out of range.
        """
        options, name = without_shared_steps(*resolve_outer(outer, codec=codec))
        policy = GroupPolicy(aggregate=aggregate, collective=collective, admission=admission)
        return cls(options, name, policy)

    @property
    def name(self) -> str:
        """The strategy's name, as written into checkpoints."""
        return type(self.options).__name__.lower()

    def check(self, *, again: bool, nodes: int, spread: bool) -> None:
        """Refuse combinations that cannot work; the result is the same on every rank of an island.

        `again`: an optimizer was wrapped before; `spread`: the model is sharded over ranks.

        Raises:
            ConfigError: with the reason, and the nearest combination that works.
        """
        if again:
            raise ConfigError(
                "a run wraps one optimizer",
                given="a second call of run.wrap",
                remedy="give one optimizer all parameters, in groups",
            )
        inner = "hybrid" if spread else "local"
        resolved = Resolved(method=self.options, inner=inner, codec=self.codec)
        check(resolved, nodes=nodes, policy=self.policy)
