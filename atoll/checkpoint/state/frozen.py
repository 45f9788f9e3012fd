"""The frozen base of a model with adapters, which checkpoints leave out.

Every member has the pretrained model already, and it is a hundred times larger than what is
trained. A checkpoint has its digest, and is refused where the base is another one. Frozen
parameters of other models are saved: a script may change them itself, e.g. a teacher that follows
its student.
"""

from __future__ import annotations

import sys
from collections.abc import Collection

import torch
from torch import Tensor, nn

from atoll.digest import Digest
from atoll.errors import CheckpointError
from atoll.task import Task

_LIBRARY = "peft.tuners.tuners_utils"


def has_adapters(model: nn.Module) -> bool:
    """Return whether a model has layers of `peft`; the library is not loaded for that."""
    kind = getattr(sys.modules.get(_LIBRARY), "BaseTunerLayer", None)
    return kind is not None and any(isinstance(module, kind) for module in model.modules())


def left_out(task: Task) -> frozenset[str]:
    """Return the names in a model's state that checkpoints leave out."""
    own = reloaded(task)
    return own | {name for name in task.model.state_dict() if is_below(name, own)} if own else own


def reloaded(task: Task) -> frozenset[str]:
    """Return those of :func:`left_out` that the model wants to load: its frozen parameters."""
    if task.elsewhere is not None or not has_adapters(task.model):
        return frozenset()
    frozen = {id(parameter) for parameter in task.frozen().values()}
    state = task.model.state_dict(keep_vars=True)
    return frozenset(name for name, value in state.items() if id(value) in frozen)


def is_below(name: str, owners: Collection[str]) -> bool:
    """Return whether a name in a state belongs to a parameter.

    bitsandbytes puts the constants of a quantized one below it: `weight.absmax`. They are made anew
    with the base, and cannot be loaded.
    """
    parts = name.split(".")
    return any(".".join(parts[:end]) in owners for end in range(len(parts) - 1, 0, -1))


def kept_state(task: Task) -> dict[str, Tensor]:
    """Return the tensors of a model's state that are saved."""
    missing = left_out(task)
    state = task.model.state_dict()
    return {n: v for n, v in state.items() if isinstance(v, Tensor) and n not in missing}


def base_digest(task: Task) -> str:
    """Return the digest of what is left out; empty: nothing is."""
    missing = left_out(task)
    if not missing:
        return ""
    frozen = task.frozen()
    versions = tuple((id(tensor), tensor._version) for tensor in frozen.values())
    known, found = task.base_digest
    if known != versions:  # half a second for 500 MB, and it never changes
        digest = Digest()
        state = task.model.state_dict()
        below = {name: state[name] for name in sorted(missing) if is_below(name, missing)}
        for name, tensor in [*frozen.items(), *below.items()]:
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
        found = digest.hexdigest()
        task.base_digest = versions, found
    return found


def check_base(task: Task, saved: str | None) -> None:
    """Refuse a checkpoint of adapters to another base; raises CheckpointError.

    `saved` is None in a checkpoint made of weights alone: it names no base.
    """
    found = base_digest(task)
    if saved is not None and found != saved:
        raise CheckpointError(
            "the checkpoint's adapters belong to another base model",
            given=f"a base with digest {found or '(none)'}", expected=saved or "no adapters",
            remedy="resume with the pretrained weights and the [tune] table of its start",
        )  # fmt: skip
