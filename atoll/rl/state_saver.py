"""A member's saved state at the hub: written in the background, read at its start.

Saved states are flat: tensors by dotted names, as in a safetensors file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from atoll.checkpoint.format.nested import flatten, nest
from atoll.errors import CheckpointCorrupt, DataError
from atoll.rl.channel.latest import Publisher
from atoll.rl.channel.messages import metadata_of, with_metadata, without_metadata
from atoll.rl.channel.names import STATES_KEPT, QueueProvider

KIND = "state"


class StateSaver:
    """Saves what a member needs for an exact resume."""

    def __init__(self, provider: QueueProvider, *, member: str) -> None:
        self._topic = provider.topic(f"state.{member}", max_items=STATES_KEPT)
        self._publisher = Publisher(self._topic)
        self._reader = f"{member}.state"

    def newest(self) -> Any:
        """Return the newest durable state, or None.

        Raises:
            CheckpointCorrupt: it is damaged, or of another version.
        """
        entry = self._topic.subscribe(self._reader, start="oldest").newest()
        if entry is None:
            return None
        try:
            message = entry.value
            about = metadata_of(message, KIND)
        except DataError as error:
            raise CheckpointCorrupt(
                "the saved state of a member cannot be read", given=str(error)
            ) from error
        return nest(str(about.get("tree", "")), without_metadata(message))

    def save(self, state: Any, *, then: Callable[[], None] = lambda: None) -> None:
        """Save a state in the background; it may change as soon as this returns.

        `then` runs in the background once it is durable. A newer state replaces an unsent one.

        Raises:
            CheckpointError: a value in it cannot be saved.
        """
        tensors, tree = flatten(state, prefix="state")
        self._publisher.put(_message(tensors, tree), then=then)

    @property
    def saved(self) -> int:
        """Number of durable states."""
        return self._publisher.published

    @property
    def sent_bytes(self) -> int:
        """Bytes sent."""
        return self._publisher.sent_bytes

    def flush(self, *, timeout_s: float = 30.0) -> bool:
        """Wait until the last state is durable and its `then` was called; return whether it is."""
        return self._publisher.flush(timeout_s=timeout_s)

    def close(self, *, timeout_s: float = 30.0) -> bool:
        """Save what is pending, and end; return whether all is durable."""
        return self._publisher.close(timeout_s=timeout_s)


def _message(tensors: Mapping[str, Tensor], tree: str) -> dict[str, Tensor]:
    json.loads(tree)  # fail now rather than when it is read
    copied = {
        name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()
    }
    return with_metadata(copied, KIND, tree=tree)


def prefixed(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of the tensors as `name.KEY`, detached and contiguous."""
    return {f"{name}.{k}": v.detach().clone().contiguous() for k, v in tensors.items()}


def parts_of(state: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return the tensors saved as `name.KEY`, by KEY."""
    start = f"{name}."
    return {k.removeprefix(start): v for k, v in state.items() if k.startswith(start)}


def load_module(module: nn.Module, tensors: Mapping[str, Tensor], *, what: str) -> None:
    """Load tensors into a module with exactly these names; all of them, or none.

    Raises:
        CheckpointCorrupt: a name is missing or unknown, or has another shape.
    """
    own = {name: tuple(one.shape) for name, one in module.state_dict().items()}
    found = {name: tuple(one.shape) for name, one in tensors.items()}
    if own != found:
        name = min(name for name in own.keys() | found.keys() if own.get(name) != found.get(name))
        raise CheckpointCorrupt(
            f"saved weights do not fit {what}",
            given=f"{name} of shape {found[name]}" if name in found else f"no {name}",
            expected="the weights of a network of the same widths and task"
            + (f", here of shape {own[name]}" if name in own else ""),
            remedy="[rl] or the environment changed since they were saved: begin a new job",
        )
    module.load_state_dict(dict(tensors))
