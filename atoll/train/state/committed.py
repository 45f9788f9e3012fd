"""The committed state on its way from members that have it to one that lacks it.

Two parts: `shared` has the same bytes on every member that stands on the same round; `inner` is one
member's own optimizer, which a newcomer borrows rather than to start its moments at zero. Where
members carry different models on purpose, both are one donor's own, and a newcomer becomes its
copy. Both are taken between two optimizer steps, in the middle of a period if need be: the common
state does not change from one round to the next.

Others read the state from threads of their own, in which the ranks of an island cannot be asked for
theirs: an island gives no optimizer, and of a model of its own what the last round made of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from atoll.checkpoint.format.nested import flatten, nest
from atoll.checkpoint.format.part import Part
from atoll.errors import CheckpointError
from atoll.island.peer_failure import is_peer_failure
from atoll.strategies.base import Outer
from atoll.task import Task

SHARED_PART, INNER_PART = "shared", "inner"
_TREE = "tree"


class CommittedState:
    """One member's state as others may have it; read only while the task rests."""

    def __init__(self, task: Task, outer: Outer) -> None:
        """Look at a task and its strategy."""
        self._task, self._outer = task, outer

    @property
    def round(self) -> int:
        """Rounds committed."""
        return self._task.round

    @property
    def base(self) -> str:
        """Digest of the committed state."""
        return self._outer.committed(self._task).base

    @property
    def identical(self) -> bool:
        """Whether all members that stand on the same round have the same state."""
        return self._outer.one_state

    def parts(self) -> tuple[Part, Part]:
        """Return the shared and the inner part; tensors are not copied."""
        task, found = self._task, self._outer.committed(self._task)
        shared = {
            "step": found.step,
            "round": task.round,
            "base": found.base,
            "chain": task.past,
            "outer": self._outer.shared_state(),
            "model": _trained(task) if found.tensors is None else {},
        }
        optimizer = task.optimizer.state_dict() if task.elsewhere is None else None
        scaler = task.scaler.state_dict() if task.scaler is not None else {}
        inner = {"optimizer": optimizer, "model": _counts(task), "scaler": scaler}
        return _part(SHARED_PART, shared), _part(INNER_PART, inner)


def adopt(task: Task, outer: Outer, *, shared: Part, inner: Part | None) -> None:
    """Set a task to the committed state of others.

    The member's counters and its place in the data stay its own.

    Args:
        task: Model, optimizer, step, round and past change.
        outer: Its strategy, set up already.
        shared: What all members have in common.
        inner: A member's optimizer; None, or without one: the own one stays as it is.

    Raises:
        CheckpointError: the parts do not fit this model, optimizer or strategy.
    """
    tree = _tree(shared)
    with task.gate.moving():
        try:
            task.pull()
            _load_model(task, tree["model"])
            if inner is not None:
                own = _tree(inner)
                _load_model(task, own["model"])
                if own["optimizer"] is not None:
                    task.optimizer.load_state_dict(own["optimizer"])
                if task.scaler is not None:
                    task.scaler.load_state_dict(own.get("scaler", {}))
            task.push()
            task.step, task.round = int(tree["step"]), int(tree["round"])
            outer.load_state_dict(tree["outer"])
            outer.rejoin(task)
            base, task.past = str(tree["base"]), str(tree["chain"])
        except (KeyError, ValueError, TypeError, RuntimeError, AttributeError) as error:
            if is_peer_failure(error):  # another rank is gone: the state is not to blame
                raise
            raise CheckpointError(
                "the state of the other members does not fit here",
                given=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
                remedy="run the same script and packages on every machine",
            ) from error
        found = outer.committed(task).base
    if found != base:
        raise CheckpointError(
            "the state that was taken over is not the committed one",
            given=f"digest {found[:16]}", expected=base[:16],
        )  # fmt: skip


def _trained(task: Task) -> dict[str, Tensor]:
    """Return what members agree on, by name: trained parameters and floating-point buffers."""
    agreed = {id(t) for t in [*task.parameters(), *task.buffers()]}
    state = task.model.state_dict(keep_vars=True)
    return {name: value.detach() for name, value in state.items() if id(value) in agreed}


def _counts(task: Task) -> dict[str, Tensor]:
    """Return the buffers that members do not agree on, e.g. counts of batches."""
    saved = task.model.state_dict(keep_vars=True)
    return {
        name: buffer
        for name, buffer in task.model.named_buffers()
        if name in saved and not buffer.is_floating_point()
    }


def _load_model(task: Task, given: Mapping[str, Any]) -> None:
    """Put the given entries into the model; the others stay as they are."""
    unknown = sorted(given.keys() - task.model.state_dict().keys())
    if unknown:
        raise KeyError(f"the model has no {unknown[0]}")
    if given:
        task.model.load_state_dict(dict(given), strict=False)


def _part(name: str, tree: Mapping[str, Any]) -> Part:
    tensors, text = flatten(tree, prefix=name)
    return Part(name, tensors, {_TREE: text})


def _tree(part: Part) -> dict[str, Any]:
    # Copies: optimizers keep the tensors they are given, and these lie in a received message.
    return dict(nest(part.metadata[_TREE], {k: v.clone() for k, v in part.tensors.items()}))
