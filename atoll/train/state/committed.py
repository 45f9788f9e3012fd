"""The committed state, as donors serve it and late members load it.

It has two parts. `shared` has the same bytes on every member of the same round. `inner` is one
member's optimizer, which a late member copies so that its moments do not start at zero. Where
members train different models on purpose, both parts are the donor's own. Both are read between
two optimizer steps, also in the middle of a period: the common state changes only in a round.

Other threads read the state, and must not issue collectives. An island therefore serves no
optimizer, and a model of its own only as of the last round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from atoll.checkpoint.format.nested import flatten, nest
from atoll.checkpoint.format.part import Part
from atoll.devices.optimizers import load_optimizer
from atoll.errors import CheckpointError, ConfigError
from atoll.island.peer_failure import is_peer_failure
from atoll.strategies.base import Outer
from atoll.strategies.vectors.whole_state import some_names, tensor_digest
from atoll.task import Task

SHARED_PART, INNER_PART = "shared", "inner"
_TREE = "tree"


class CommittedState:
    """One member's state as donors serve it; read only while the task is still."""

    def __init__(self, task: Task, outer: Outer) -> None:
        self._task, self._outer = task, outer
        self._frozen: tuple[list[tuple[int, int]], dict[str, str]] = ([], {})

    @property
    def round(self) -> int:
        """Number of committed rounds."""
        return self._task.round

    @property
    def base(self) -> str:
        """Digest of the committed state."""
        return self._task.labelled(self._outer.committed(self._task).base)

    @property
    def identical(self) -> bool:
        """Whether all members of the same round have the same state."""
        return self._outer.one_state

    def parts(self) -> tuple[Part, Part]:
        """Return the shared and the inner part; tensors are not copied."""
        task, found = self._task, self._outer.committed(self._task)
        shared = {
            "step": found.step,
            "round": task.round,
            "base": task.labelled(found.base),
            "exchanged": list(task.exchanged),
            "chain": task.past,
            "outer": self._outer.shared_state(),
            "model": {**_small_frozen(task), **(_trained(task) if found.tensors is None else {})},
            "frozen": self._frozen_digests(),
        }
        optimizer = task.optimizer.state_dict() if task.elsewhere is None else None
        scaler = task.scaler.state_dict() if task.scaler is not None else {}
        inner = {"optimizer": optimizer, "model": _counts(task), "scaler": scaler}
        return _part(SHARED_PART, shared), _part(INNER_PART, inner)

    def _frozen_digests(self) -> dict[str, str]:
        """Return the digests of frozen parameters, computed again only if they have changed."""
        frozen = self._task.frozen()
        versions = [(id(tensor), tensor._version) for tensor in frozen.values()]
        if versions != self._frozen[0]:
            self._frozen = versions, {n: tensor_digest(t).hex() for n, t in frozen.items()}
        return self._frozen[1]


def adopt(task: Task, outer: Outer, *, shared: Part, inner: Part | None) -> None:
    """Load the committed state of other members; counters and data position stay the member's own.

    Args:
        task: Model, optimizer, step, round and history hash.
        outer: Its strategy, already set up.
        shared: The part that all members have in common.
        inner: A donor's optimizer; None keeps the own one.

    Raises:
        CheckpointError: the parts do not fit this model, optimizer or strategy.
    """
    with task.state_lock.moving():
        try:
            tree = _tree(shared)
            task.pull()
            _fit(task, tree.get("exchanged", []))
            _load_model(task, tree["model"])
            _check_frozen(task, tree.get("frozen", {}))
            if inner is not None:
                own = _tree(inner)
                _load_model(task, own["model"])
                if own["optimizer"] is not None:
                    load_optimizer(task.optimizer, own["optimizer"])
                if task.scaler is not None:
                    task.scaler.load_state_dict(own.get("scaler", {}))
            task.push()
            task.step, task.round = int(tree["step"]), int(tree["round"])
            outer.load_state_dict(tree["outer"])
            outer.rejoin(task)
            base, task.past = str(tree["base"]), str(tree["chain"])
        except (KeyError, ValueError, TypeError, RuntimeError, AttributeError) as error:
            if is_peer_failure(error):  # another rank has died: the state may be valid
                raise
            raise CheckpointError(
                "the state of the other members does not fit here",
                given=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
                remedy="run the same script and packages on every machine",
            ) from error
        found = task.labelled(outer.committed(task).base)
    if found != base:
        raise CheckpointError(
            "the recovered state is not the committed one",
            given=f"digest {found[:16]}", expected=base[:16],
        )  # fmt: skip


EXCHANGED = "shared.exchanged"
"""Key of the exchanged parameters' names in the strategy's part of a checkpoint."""


def exchanged_state(task: Task) -> dict[str, Tensor]:
    """Return the names of the exchanged parameters for a checkpoint, if they have changed."""
    if not task.exchanged:
        return {}
    return {EXCHANGED: torch.tensor(list(" ".join(task.exchanged).encode()), dtype=torch.uint8)}


def take_exchanged(task: Task, state: dict[str, Tensor]) -> None:
    """Exchange the parameters that a checkpoint names; the entry is removed from its state.

    Raises:
        ConfigError: this member trains others, too.
    """
    names = state.pop(EXCHANGED, None)
    if names is not None:
        _fit(task, bytes(names.tolist()).decode().split(" "))


def _fit(task: Task, names: Sequence[str]) -> None:
    """Exchange the parameters that the other members exchange."""
    if tuple(names) == task.exchanged:
        return
    if task.fit is None or not names:
        raise ValueError(f"this member exchanges other parameters: {task.exchanged or names}")
    task.fit(names)


def _small_frozen(task: Task) -> dict[str, Tensor]:
    """Return the frozen parameters, unless they are larger than the trained ones.

    A large frozen part is usually a pretrained model that every member has: only its digests are
    compared.
    """
    frozen = {name: tensor.detach() for name, tensor in task.frozen().items()}
    trained_bytes = sum(parameter.nbytes for parameter in task.parameters())
    return frozen if sum(t.nbytes for t in frozen.values()) <= trained_bytes else {}


def _check_frozen(task: Task, digests: Mapping[str, str]) -> None:
    """Compare the frozen parameters with those of the other members.

    Raises:
        ConfigError: they differ, and rounds would never make them equal.
    """
    own = {name: tensor_digest(tensor).hex() for name, tensor in task.frozen().items()}
    wrong = [name for name in own if digests and digests.get(name) != own[name]]
    if wrong:
        raise ConfigError(
            "this member's frozen parameters differ from those of the others",
            given=some_names(wrong),
            expected="the same values on every member; large frozen parts are not sent",
            remedy="load the same weights, or use the same seed, before run.wrap",
        )


def _trained(task: Task) -> dict[str, Tensor]:
    """Return the tensors that members agree on: trained parameters and floating-point buffers."""
    agreed = {id(t) for t in [*task.parameters(), *task.buffers()]}
    state = task.model.state_dict(keep_vars=True)
    return {name: value.detach() for name, value in state.items() if id(value) in agreed}


def _counts(task: Task) -> dict[str, Tensor]:
    """Return the buffers that members do not agree on, e.g. batch counters."""
    saved = task.model.state_dict(keep_vars=True)
    return {
        name: buffer
        for name, buffer in task.model.named_buffers()
        if name in saved and not buffer.is_floating_point()
    }


def _load_model(task: Task, entries: Mapping[str, Any]) -> None:
    """Load the entries into the model; the others keep their values."""
    unknown = sorted(entries.keys() - task.model.state_dict().keys())
    if unknown:
        raise KeyError(f"the model has no {unknown[0]}")
    if entries:
        task.model.load_state_dict(dict(entries), strict=False)


def _part(name: str, tree: Mapping[str, Any]) -> Part:
    tensors, text = flatten(tree, prefix=name)
    return Part(name, tensors, {_TREE: text})


def _tree(part: Part) -> dict[str, Any]:
    # Clone: optimizers keep the tensors, which are views of the received message.
    return dict(nest(part.metadata[_TREE], {k: v.clone() for k, v in part.tensors.items()}))
