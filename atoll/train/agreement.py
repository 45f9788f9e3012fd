"""The synchronization settings of `run.wrap`, checked before a script trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from atoll.errors import ConfigError
from atoll.group.aggregation import Aggregation
from atoll.strategies.compatibility import check
from atoll.strategies.resolve import Resolved, resolve_outer, without_shared_steps
from atoll.strategies.wrapped_optimizer import two_moments


@dataclass(frozen=True, slots=True)
class Agreement:
    """The options of an outer strategy, a codec, the aggregation and the run's last step."""

    options: Any
    codec: str
    aggregation: Aggregation
    steps: int
    """0: unknown."""

    @classmethod
    def of(
        cls, outer: str | object, *, steps: int, codec: str, aggregation: Aggregation
    ) -> Agreement:
        """Parse the arguments of `run.wrap`.

        Raises:
            ConfigError: a name is unknown, or a number is out of range.
        """
        if steps < 0:
            raise ConfigError(
                "the number of steps is too small", given=f"steps={steps}",
                expected="the optimizer steps of the run, or 0 where they are unknown",
            )  # fmt: skip
        found = resolve_outer(outer, codec=codec, steps=steps or None)
        options, name = without_shared_steps(*found)
        return cls(options, name, aggregation, steps)

    @property
    def name(self) -> str:
        """The strategy's name, as written into checkpoints."""
        return type(self.options).__name__.lower()

    def check(self, *, again: bool, nodes: int, spread: bool, optimizers: int = 1) -> None:
        """Refuse combinations that cannot work; the result is the same on every rank of an island.

        Args:
            again: An optimizer was wrapped before.
            nodes: Number of members.
            spread: The model is sharded over ranks.
            optimizers: Number of optimizers that are wrapped together.

        Raises:
            ConfigError: with the reason, and the nearest combination that works.
        """
        if again:
            raise ConfigError(
                "run.wrap is called once, with all that is trained",
                given="a second call of run.wrap",
                remedy="run.wrap([discriminator, generator], [its_optimizer, the_other]), "
                "in the order of their steps",
            )
        if optimizers > 1 and spread:
            raise ConfigError(
                "an island trains with one optimizer",
                given=f"{optimizers} optimizers on several ranks",
                remedy="give one optimizer all parameters, in groups",
            )
        if optimizers > 1 and two_moments(self.options.build()):
            raise ConfigError(
                "this method acts in every step of one optimizer",
                given=f"{self.name} with {optimizers} optimizers",
                expected="a method that combines the parameters of all models after some steps",
                remedy="outer='diloco' or 'local-sgd', or one optimizer with all parameters",
            )
        inner = "hybrid" if spread else "local"
        resolved = Resolved(method=self.options, inner=inner, codec=self.codec)
        check(resolved, nodes=nodes, aggregation=self.aggregation)
