"""Initial weights of all paths of a job: those of a plain model, as in the paper."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from atoll.checkpoint.format.weights import load_weights
from atoll.errors import ConfigError


def begin_from(file: str, model: nn.Module) -> None:
    """Give a model the weights in a file; an empty name changes nothing.

    Raises:
        CheckpointMissing, CheckpointCorrupt: there is no such file, or it is damaged.
        ConfigError: the weights are of another model.
    """
    if not file:
        return
    weights = load_weights(Path(file))
    own = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    saved = {name: tuple(value.shape) for name, value in weights.state.items()}
    if own != saved:
        differ = sorted(n for n in own.keys() | saved.keys() if own.get(n) != saved.get(n))
        name = differ[0]
        raise ConfigError(
            "the paths cannot begin with these weights: they are of another model",
            given=f"start = {file!r}: {name} is {saved.get(name, 'missing')}",
            expected=f"{own.get(name, 'no such weight')}, as [model] says",
            remedy="the same [model] as that of the job that trained the weights; levels share no "
            "weight, so that job needs tie = false too",
        )
    model.load_state_dict(weights.state)
