"""How members of a script come to agree: what `run.wrap` was told, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from atoll.errors import ConfigError
from atoll.group.policy import GroupPolicy
from atoll.strategies.compatibility import check
from atoll.strategies.resolve import Resolved, resolve_outer, without_shared_steps


@dataclass(frozen=True, slots=True)
class Agreement:
    """An outer strategy's options, a codec and a policy of the group."""

    options: Any
    codec: str
    policy: GroupPolicy

    @classmethod
    def of(
        cls, outer: str | object, *, codec: str, aggregate: str, collective: str, admission: str
    ) -> Agreement:
        """Return what the arguments of `run.wrap` mean.

        Raises:
            ConfigError: an unknown name, or a number out of range.
        """
        options, name = without_shared_steps(*resolve_outer(outer, codec=codec))
        policy = GroupPolicy(aggregate=aggregate, collective=collective, admission=admission)
        return cls(options, name, policy)

    @property
    def name(self) -> str:
        """The strategy's name, as checkpoints have it."""
        return type(self.options).__name__.lower()

    def check(self, *, again: bool, nodes: int, spread: bool) -> None:
        """Refuse what cannot work; the same on every rank of an island.

        Args:
            again: An optimizer was wrapped before.
            nodes: Members.
            spread: The model lies over several ranks.

        Raises:
            ConfigError: it cannot; the message has the reason and the nearest thing that works.
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
