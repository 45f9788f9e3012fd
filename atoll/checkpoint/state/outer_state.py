"""Restore an outer strategy's state, also when the run continues with another strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from atoll.checkpoint.state.capture import Restored
from atoll.errors import ConfigError

CODEC_STATE = "own.codec."
"""Prefix of the keys under which an outer strategy keeps its codec's state."""


class StatefulOuter(Protocol):
    """The part of an outer strategy used here."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned."""
        ...


def adopt(outer: StatefulOuter, restored: Restored, *, strategy: str) -> str:
    """Load the outer state of a checkpoint if it is of this strategy, otherwise skip it.

    If skipped, the strategy starts from the restored model, which is equal on every member, with
    fresh momentum. All members decide alike, because the strategy's name is in the shared part.

    Args:
        outer: Set up already with the restored task.
        restored: Result of `resume`.
        strategy: Name of the current outer strategy.

    Returns:
        A sentence for people that says what was skipped, or an empty text.

    Raises:
        ConfigError: the state is of this strategy, but of another model.
    """
    if not restored.outer:
        return ""
    names = ", ".join(sorted(restored.outer)[:6])
    if restored.strategy and strategy and restored.strategy != strategy:
        return (
            f"the checkpoint was written under {restored.strategy}, the run uses "
            f"{strategy}: the outer state ({names}) is left out, and all members take the "
            "optimizer of the first"
        )
    try:
        outer.load_state_dict(restored.outer)
    except KeyError as error:
        if restored.strategy:
            raise
        return f"the outer state ({names}) is of another strategy and is left out: no {error}"
    except ConfigError as error:
        rest = {k: v for k, v in restored.outer.items() if not k.startswith(CODEC_STATE)}
        if len(rest) == len(restored.outer):
            raise
        outer.load_state_dict(rest)
        return f"the codec's residual is left out: {error}"
    return ""
