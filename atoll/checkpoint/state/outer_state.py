"""Gives an outer strategy its state back, also when the run goes on under another strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from atoll.checkpoint.state.capture import Restored
from atoll.errors import ConfigError

CODEC_STATE = "own.codec."
"""Start of the keys under which an outer strategy keeps the state of its codec."""


class StatefulOuter(Protocol):
    """What an outer strategy is here."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned."""
        ...


def adopt(outer: StatefulOuter, restored: Restored, *, strategy: str) -> str:
    """Load the outer state of a checkpoint if it is of this strategy, otherwise leave it out.

    Left out, the strategy starts as it was set up: from the restored model, which is the same on
    every member, with fresh momentum. Every member decides alike, because the name of the strategy
    is in the shared part.

    Args:
        outer: Set up already with the restored task.
        restored: What `resume` returned.
        strategy: Name of the outer strategy that runs now.

    Returns:
        Nothing, or a sentence that says what was left out, for people.

    Raises:
        ConfigError: the state is of this strategy, but of another model.
    """
    if not restored.outer:
        return ""
    names = ", ".join(sorted(restored.outer)[:6])
    if restored.strategy and strategy and restored.strategy != strategy:
        return (
            f"the checkpoint was written under {restored.strategy}, the run goes on under "
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
        return f"what the codec still owed is left out: {error}"
    return ""
