"""Saved states are flat: tensors by dotted names, as a safetensors file keeps them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from atoll.errors import CheckpointCorrupt


def prefixed(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of the tensors as `name.KEY`, detached and contiguous."""
    return {f"{name}.{k}": v.detach().clone().contiguous() for k, v in tensors.items()}


def parts_of(state: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return what was put in as `name.KEY`, by KEY."""
    start = f"{name}."
    return {k.removeprefix(start): v for k, v in state.items() if k.startswith(start)}


def load_module(module: nn.Module, tensors: Mapping[str, Tensor], *, what: str) -> None:
    """Load the tensors into a module that has exactly these.

    Raises:
        CheckpointCorrupt: a name is missing, is too much, or has another shape.
    """
    try:
        module.load_state_dict(dict(tensors))
    except RuntimeError as error:
        raise CheckpointCorrupt(
            f"saved weights do not fit {what}",
            given=" ".join(str(error).split())[:300],
            expected="the weights of a network of the same widths and task",
            remedy="[rl] or the environment changed since they were saved: begin a new job",
        ) from error
