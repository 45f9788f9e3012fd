"""The description of a policy's task: enough to build its networks anywhere."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from atoll.errors import ConfigError

DISCRETE, MULTI_DISCRETE, CONTINUOUS = "discrete", "multi-discrete", "continuous"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Actions:
    """The action space of one agent."""

    kind: str
    """`discrete`, `multi-discrete` or `continuous`."""
    sizes: tuple[int, ...]
    """Number of choices of each component; for a continuous space its dimension."""
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
    """One policy's task, as the critic needs it."""

    policy: str
    """Name of the policy; each has a value head of its own."""
    task: str
    """Policies with the same task can learn values from each other's experience."""
    observation: tuple[int, ...]
    """Shape of one flat observation, e.g. (4,)."""
    actions: Actions
    gamma: float
    """Discount per step."""
    state: tuple[int, ...] = ()
    """Shape of the joint state that a centralised critic sees; empty without one."""
    agents: int = 1
    """Agents of one environment, each a column of its trajectories."""
    env: str = ""
    """Name of the environment: observations of one name and shape share an encoder."""

    def to_json(self) -> str:
        """Return it as text for `from_json`."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TaskSpec:
        """Restore the result of `to_json`.

        Raises:
            ConfigError: the text is something else.
        """
        try:
            found: Mapping[str, Any] = json.loads(text)
            actions, rest = _tuples(found["actions"]), _tuples(found)
            return cls(**{**rest, "actions": Actions(**actions)})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                "this is not a description of a task", given=repr(text[:200]),
                expected="a message of the same version",
            ) from error  # fmt: skip


def _tuples(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries with lists as tuples."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in found.items()}
