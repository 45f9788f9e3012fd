"""What a policy sees and does, in numbers: enough to build networks for it anywhere."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from atoll.errors import ConfigError

DISCRETE, MULTI_DISCRETE, CONTINUOUS = "discrete", "multi-discrete", "continuous"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Actions:
    """The space of actions of one agent."""

    kind: str
    """`discrete`, `multi-discrete` or `continuous`."""
    sizes: tuple[int, ...]
    """Choices of each component; of a continuous space one number, its dimensions."""
    low: tuple[float, ...] = ()
    """Continuous: smallest values."""
    high: tuple[float, ...] = ()
    """Continuous: largest values."""

    @property
    def width(self) -> int:
        """Numbers in one stored action: 1 for `discrete`."""
        return self.sizes[0] if self.kind == CONTINUOUS else len(self.sizes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """One policy's task, as the critic has to know it."""

    policy: str
    """Name of the policy whose values are meant: each has a head of its own."""
    task: str
    """Policies with the same word solve the same task, and may stand in for each other."""
    observation: tuple[int, ...]
    """Shape of one flat observation, e.g. (4,)."""
    actions: Actions
    gamma: float
    """Discount per step."""
    state: tuple[int, ...] = ()
    """Shape of the joint state that a centralised critic sees; empty: there is none."""
    agents: int = 1
    """Agents of one environment, each a column of its trajectories."""
    env: str = ""
    """Name of the environment: a critic reads the observations of one name and shape alike."""

    def to_json(self) -> str:
        """Return it as text that `from_json` reads back."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TaskSpec:
        """Return what `to_json` wrote.

        Raises:
            ConfigError: it is something else.
        """
        try:
            found: Mapping[str, Any] = json.loads(text)
            actions, rest = _tuples(found["actions"]), _tuples(found)
            return cls(**{**rest, "actions": Actions(**actions)})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                "this is no description of a task", given=repr(text[:200]),
                expected="what another member of the same version sent",
            ) from error  # fmt: skip


def _tuples(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries with lists as tuples."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in found.items()}
