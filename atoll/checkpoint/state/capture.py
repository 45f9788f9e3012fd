"""Collect one member's training state into parts of a checkpoint, and restore it.

The shared part is equal for all members: model, the outer strategy's common state, schedule, round
and step. A member's part has its inner optimizer, random number generators, data cursor, codec
residuals and counters. After `resume` training continues bit for bit.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.checkpoint.format.nested import TREE, flatten, nest
from atoll.checkpoint.format.part import SHARED, STATE, Part, member_part
from atoll.checkpoint.format.weights import MODEL_PREFIX, plain_names
from atoll.checkpoint.state.frozen import base_digest, check_base, kept_state, reloaded
from atoll.checkpoint.stores.store import Store
from atoll.devices.optimizers import load_optimizer
from atoll.devices.runtime import random_states, set_random_states
from atoll.digest import Digest
from atoll.errors import CheckpointCorrupt, CheckpointError
from atoll.ids import slot_of
from atoll.task import Task

SHARED_STATE = "shared."
"""Prefix of an outer strategy's state keys that are equal on every member."""

OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True)
class OuterState:
    """An outer strategy's state, and how the members' models relate under it."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """Keys that start with `shared.` go to the shared part."""
    own_model: bool = False
    """Members have different models on purpose: each saves its own."""
    base: str | None = None
    """Digest of the model agreed on in the last round; None: it is hashed here."""
    agreed: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors in which the shared model differs from this member's own."""


@dataclass(frozen=True, slots=True)
class Extras:
    """The content of a checkpoint besides task and outer strategy."""

    strategy: str = ""
    """Name of the outer strategy."""
    cursor: Mapping[str, int] = field(default_factory=dict)
    """Position in the data."""
    counters: Mapping[str, float | int | str] = field(default_factory=dict)
    """Numbers of the caller that continue after a resume."""
    about: Mapping[str, str] = field(default_factory=dict)
    """Metadata that rebuild the model (see `describe`)."""
    rank_states: Sequence[Mapping[str, Any]] = ()
    """By rank: further state of a script."""


@dataclass(frozen=True, slots=True)
class Restored:
    """State that `resume` leaves to the caller to restore."""

    outer: dict[str, Tensor]
    """For the outer strategy's `load_state_dict`."""
    cursor: dict[str, int] | None = None
    """Data cursor; None for a joining member, which starts at the beginning of its shard."""
    counters: dict[str, float | int | str] = field(default_factory=dict)
    """The `counters` of `Extras`."""
    borrowed: bool = False
    """The checkpoint has no part of this member: it loaded another member's inner optimizer."""
    leases: dict[int, dict[str, int]] = field(default_factory=dict)
    """Every data slot's cursor when the round was committed."""
    strategy: str = ""
    """Name of the outer strategy that `outer` belongs to; empty: unknown."""
    rank_states: list[dict[str, Any]] = field(default_factory=list)
    """By rank: further state of a script."""


def resume(store: Store, round_: int, task: Task, *, strategy: str = "") -> Restored:
    """Load a checkpoint into a task; return the state that the caller has to restore.

    A member without a part in the checkpoint loads optimizer and schedule of the first member. So
    do all members when the run continues with another outer strategy: one in which all members take
    the same step needs equal optimizers, and different replicas become one. A checkpoint without
    member parts, like imported weights, sets the model only.

    Args:
        store: Where from.
        round_: Which checkpoint.
        task: What is trained; changed in place.
        strategy: Name of the current outer strategy; empty: the saved one.

    Raises:
        CheckpointMissing: there is no complete checkpoint of that round.
        CheckpointCorrupt: a part is damaged; it is named.
        CheckpointError: it is of another model or optimizer.
    """
    members = store.manifest(round_).members
    shared = _take(store, round_, SHARED)
    if not members:
        return restore_shared(task, shared)
    first = min(members, key=slot_of)
    before = str(_tree_of(shared).get("strategy", ""))
    changed = bool(strategy and before and strategy != before)
    if task.member not in members:
        return restore(task, shared, _take(store, round_, member_part(first)), borrowed=True)
    own = _take(store, round_, member_part(task.member))
    if not changed:
        return restore(task, shared, own)
    donor = own if first == task.member else _take(store, round_, member_part(first))
    return restore(task, shared, own, donor=donor)


def _take(store: Store, round_: int, name: str) -> Part:
    found = store.get(round_, names={name})
    if name not in found:
        raise CheckpointCorrupt(
            f"the checkpoint of round {round_} has no part {name}", given=sorted(found)
        )
    return found[name]


def collect(task: Task, outer: OuterState, extras: Extras) -> tuple[Part, Part]:
    """Return the member's own part and the shared part right after a committed round.

    Tensors are not copied, so neither they nor the task may change until the parts are written.

    Raises:
        CheckpointError: some state has a type that cannot be saved.
    """
    scheduler = task.scheduler.state_dict() if task.scheduler is not None else None
    model, extra = _split_model(task)
    base = outer.base
    if base is None:
        base = "" if outer.own_model else _model_digest(model)
    shared = {k for k in outer.tensors if k.startswith(SHARED_STATE)}
    state = {STATE: base} if base else {}
    progress = {"step": task.step, "round": task.round, "scheduler": scheduler}
    common = {
        **progress,
        "outer": {k: v for k, v in outer.tensors.items() if k in shared},
        "model": extra,
        "frozen_base": base_digest(task),
        "leases": {int(slot): dict(cursor) for slot, cursor in task.leases.items()},
        "strategy": extras.strategy,
    }
    own = {
        **progress,
        "tokens": task.tokens,
        "optimizer": task.optimizer_state(),
        "scaler": task.scaler.state_dict() if task.scaler is not None else {},
        "random": random_state(),
        "outer": {k: v for k, v in outer.tensors.items() if outer.own_model or k not in shared},
        "cursor": dict(extras.cursor),
        "counters": dict(extras.counters),
        "model": extra if outer.own_model else {},
        "ranks": [dict(state) for state in extras.rank_states],
    }
    own_tensors, own_tree = flatten(own, prefix="own")
    tensors, tree = flatten(common, prefix="common")
    named = {MODEL_PREFIX + name: tensor for name, tensor in model.items()}
    common_model = {MODEL_PREFIX + name: tensor for name, tensor in outer.agreed.items()}
    return (
        Part(
            member_part(task.member),
            own_tensors | (named if outer.own_model else {}),
            {TREE: own_tree, **state},
        ),
        Part(SHARED, {**named, **common_model, **tensors}, {**extras.about, TREE: tree, **state}),
    )


def weights_only(model: Mapping[str, Tensor], *, about: Mapping[str, str]) -> Part:
    """Return a shared part that holds only a model, at step 0."""
    common: dict[str, Any] = {"step": 0, "round": 0, "scheduler": None, "outer": {}, "model": {}}
    tree = flatten(common, prefix="common")[1]
    named = {MODEL_PREFIX + name: tensor for name, tensor in model.items()}
    return Part(SHARED, named, {**about, TREE: tree, STATE: _model_digest(model)})


def restore_shared(task: Task, shared: Part) -> Restored:
    """Load only the shared part into a task; optimizer and random generators stay.

    Raises:
        CheckpointCorrupt: it is not a part of a checkpoint.
        CheckpointError: it is of another model or schedule.
    """
    common = _tree_of(shared)
    check_base(task, common.get("frozen_base"))
    _load_model(task, plain_names(_model_tensors(shared)), extra=common["model"])
    if task.scheduler is not None and common["scheduler"] is not None:
        _load(task.scheduler, common["scheduler"], kind="scheduler")
    task.step, task.round, task.tokens = int(common["step"]), int(common["round"]), 0
    return _of_all(common)


def _of_all(common: Mapping[str, Any]) -> Restored:
    """Return what a caller restores itself, as far as the shared part has it."""
    return Restored(
        outer=dict(common["outer"]),
        borrowed=True,
        leases={int(slot): dict(cursor) for slot, cursor in common.get("leases", {}).items()},
        strategy=str(common.get("strategy", "")),
    )


def restore(
    task: Task, shared: Part, own: Part, *, borrowed: bool = False, donor: Part | None = None
) -> Restored:
    """Load two parts into a task; return the state that the caller has to restore.

    Args:
        task: Its model, optimizer, scheduler and progress change; so do the random generators.
        shared: The shared part.
        own: The member's own part, or another's.
        borrowed: It is another's: only optimizer and schedule are loaded from it.
        donor: Part whose optimizer all members load, with the shared model; None: each its own.

    Raises:
        CheckpointCorrupt: the parts are not of one checkpoint.
        CheckpointError: they are of another model or optimizer.
    """
    for part in (own, donor or own):
        if shared.metadata.get(STATE) != part.metadata.get(STATE):
            raise CheckpointCorrupt(
                f"parts {shared.name} and {part.name} are not of one checkpoint",
                given=f"state {part.metadata.get(STATE)}",
                expected=f"state {shared.metadata.get(STATE)}",
            )
    common, mine = _tree_of(shared), _tree_of(own)
    check_base(task, common.get("frozen_base"))
    holder, extra = (shared, common["model"])
    if _model_tensors(own) and not borrowed and donor is None:
        holder, extra = own, mine["model"]
    _load_model(task, plain_names(_model_tensors(holder)), extra=extra)
    giver = _tree_of(donor) if donor is not None else mine
    _load(task.optimizer, _copied(giver["optimizer"]), kind=OPTIMIZER)
    if task.scaler is not None:
        _load(task.scaler, giver.get("scaler", {}), kind="scale of the loss")
    if task.scheduler is not None and mine["scheduler"] is not None:
        _load(task.scheduler, mine["scheduler"], kind="scheduler")
    task.step, task.round = int(mine["step"]), int(mine["round"])
    found = _of_all(common)
    if borrowed:
        task.tokens = 0
        return found
    task.tokens = int(mine["tokens"])
    set_random_state(mine["random"])
    return replace(
        found,
        outer={**common["outer"], **mine["outer"]},
        cursor=dict(mine["cursor"]),
        counters=dict(mine["counters"]),
        rank_states=list(mine.get("ranks", [])),
        borrowed=False,
    )


def random_state() -> dict[str, Any]:
    """Return the state of every global random number generator.

    Of torch in main memory and on accelerators, of numpy and of Python.
    """
    return {
        "torch": torch.get_rng_state(),
        "accelerators": random_states(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore what `random_state` returned; missing devices are skipped."""
    torch.set_rng_state(state["torch"])
    set_random_states(state["accelerators"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])


def _split_model(task: Task) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a model's state, and what else a module put there."""
    state = task.model.state_dict()
    return kept_state(task), {n: v for n, v in state.items() if not isinstance(v, Tensor)}


def _model_tensors(part: Part) -> dict[str, Tensor]:
    return {k: v for k, v in part.tensors.items() if k.startswith(MODEL_PREFIX)}


def _load_model(task: Task, tensors: Mapping[str, Tensor], *, extra: Mapping[str, Any]) -> None:
    try:
        task.model.load_state_dict({**tensors, **extra, **_own(task, reloaded(task))})
    except RuntimeError as error:
        raise CheckpointError(
            "the checkpoint is of another model",
            given=" ".join(str(error).split())[:400],
            remedy="resume with the [model] and tokenizer it was written with",
        ) from error


def _own(task: Task, names: frozenset[str]) -> dict[str, Any]:
    """Return the task's own values under some names, so that a strict load can fill them in."""
    state = task.model.state_dict() if names else {}
    return {name: state[name] for name in names}


def _load(target: Any, state: Any, *, kind: str) -> None:
    """Load the state of an optimizer or scheduler."""
    try:
        load = partial(load_optimizer, target) if kind == OPTIMIZER else target.load_state_dict
        load(state)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"the checkpoint is of another {kind}",
            given=f"{type(error).__name__}: {error}",
            remedy="resume with the [train] table it was written with",
        ) from error


def _copied(state: Any) -> Any:
    """Return a state with tensors of its own.

    An optimizer keeps the tensors that it loads. Those of a part have the alignment that they have
    in its file, and a dot product of misaligned vectors (LBFGS) rounds in another order.
    """
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, Mapping):
        return {key: _copied(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_copied(value) for value in state)
    return state


def _tree_of(part: Part) -> dict[str, Any]:
    if TREE not in part.metadata:
        raise CheckpointCorrupt(
            f"{part.name} is not a part of a checkpoint",
            given=json.dumps(sorted(part.metadata)),
            expected=f"metadata with {TREE!r}",
        )
    tree = nest(part.metadata[TREE], part.tensors)
    return dict(tree)


def _model_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of names and bytes, equal for parts of the same model."""
    digest = Digest()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        if tensor.numel():
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()
