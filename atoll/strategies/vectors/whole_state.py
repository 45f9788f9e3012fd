"""All that a model holds: digests that name a tensor, and exact copies between members.

What members exchange in rounds is only a part of it. Frozen parameters are equal because they are
equal at the start and not trained; counts, such as the batches that BatchNorm has seen, are each
member's own. So equality is checked over everything, tensor by tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from atoll.digest import Digest
from atoll.strategies.vectors.flat import WIDE, real_view
from atoll.task import Task, is_inexact

WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Parts of a name that only say how a module is wrapped on this machine."""

MOST_NAMES = 5
"""Tensors named in a message."""

MOST_GROUPS = 512
"""Digests in a member's report; larger models report runs of neighbouring tensors together."""


def whole_state(task: Task) -> dict[str, Tensor]:
    """Return every parameter, trained or frozen, and every saved buffer, by name, in order."""
    task.pull()
    found: dict[str, Tensor] = {**dict(task.model.named_parameters()), **task.saved_buffers()}
    return {plain_name(name): tensor for name, tensor in found.items()}


def plain_state(model: nn.Module) -> dict[str, Any]:
    """Return a model's state under names without the wrappers in it."""
    return {plain_name(name): value for name, value in model.state_dict().items()}


def plain_name(name: str) -> str:
    """Return a tensor's name without the wrappers in it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def layout(tensors: Iterable[Tensor]) -> bytes:
    """Return 8 bytes that are equal where shapes and kinds of numbers are, in this order."""
    text = ";".join(f"{tuple(t.shape)} {canonical_type(t)}" for t in tensors)
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def tensor_digest(tensor: Tensor) -> bytes:
    """Return 16 bytes over a tensor's canonical values; zeros on torch's device `meta`."""
    if tensor.is_meta:
        return bytes(16)
    return Digest(_bytes(tensor).data).digest()


def together(digests: Iterable[bytes]) -> bytes:
    """Return one digest of many, 16 bytes."""
    return Digest(b"".join(digests)).digest()


def canonical_type(tensor: Tensor) -> torch.dtype:
    """Return the type in which a tensor's values are compared and copied.

    Half precision counts as float32, so that members may differ in it.
    """
    if is_inexact(tensor) and tensor.dtype not in WIDE:
        return torch.float32
    return torch.float64 if tensor.dtype == torch.complex128 else tensor.dtype


def words(tensors: Sequence[Tensor]) -> Tensor:
    """Return the bytes of tensors as float32 numbers of 16 bits each, (n,).

    Numbers up to 2^24 survive a weighted mean exactly, if one member has all the weight; floats
    would not: -0.0 becomes 0.0, and infinity times 0 is not a number.
    """
    return torch.from_numpy(np.concatenate([_words(tensor) for tensor in tensors]))


def values(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that `words` was made of, in the canonical type and real shape."""
    found, start, packed = [], 0, vector.numpy().astype("<u2")
    for tensor in like:
        kind, shape = canonical_type(tensor), real_view(tensor).shape
        nbytes = kind.itemsize * shape.numel()
        end = start + -(-nbytes // 2)
        data = np.frombuffer(packed[start:end].tobytes(), np.uint8)[:nbytes].copy()
        value = torch.empty(shape, dtype=kind)
        if nbytes:  # torch refuses to view nothing as another type
            value = torch.from_numpy(data).view(kind).view(shape)
        found.append(value)
        start = end
    return found


def report(task: Task) -> dict[str, Any]:
    """Return what members compare at the end of a run, as entries of their result."""
    return report_on(whole_state(task), own={plain_name(name) for name in task.counts()})


def report_on(state: Mapping[str, Tensor], *, own: Collection[str] = ()) -> dict[str, Any]:
    """Return what members compare, of tensors by name.

    `digest` covers what is equal on all members of a round: parameters and inexact buffers.
    `tensors` has a short digest by name of these, and `own_tensors` of those named in `own`.
    """
    digests = {name: tensor_digest(tensor) for name, tensor in state.items()}
    common = {name: found for name, found in digests.items() if name not in own}
    return {
        "digest": together(common.values()).hex(),
        "tensors": _grouped(common),
        "own_tensors": _grouped({name: digests[name] for name in digests if name in own}),
    }


def not_synchronised(task: Task, *, rounded: bool) -> list[str]:
    """Return messages that name what rounds do not keep equal, bit for bit.

    `rounded`: the strategy keeps float32 only.
    """
    frozen, counts = task.frozen(), task.counts()
    state, all_buffers = task.saved_buffers(), dict(task.model.named_buffers())
    unsaved = {name: b for name, b in all_buffers.items() if name not in state}
    wide = {
        name: tensor
        for name, tensor in {**dict(task.model.named_parameters()), **state}.items()
        if tensor.dtype in WIDE and name not in frozen
    }
    kept = "rounded to float32 by its servers" if rounded else "kept exactly"
    found = (
        (frozen, "frozen parameters, equal at the start; never exchanged unless they are trained"),
        (counts, "counts and flags, equal at the start; each member goes on with its own"),
        (unsaved, "buffers that checkpoints leave out; each member has its own"),
        (wide, f"float64 values: differences are exchanged as float32 at best; {kept}"),
    )
    return [f"{some_names(list(names))} ({about})" for names, about in found if names]


def some_names(names: Sequence[str]) -> str:
    """Return a few names, and how many more there are."""
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _grouped(digests: Mapping[str, bytes]) -> dict[str, str]:
    """Return 8 hex digits by name; runs of neighbours share them if there are too many."""
    names, each = list(digests), max(1, -(-len(digests) // MOST_GROUPS))
    found: dict[str, str] = {}
    for start in range(0, len(names), each):
        run = names[start : start + each]
        label = run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}"
        found[label] = together(digests[name] for name in run).hex()[:8]
    return found


def _bytes(tensor: Tensor) -> Any:
    value = real_view(tensor).detach().to("cpu", canonical_type(tensor)).contiguous()
    return value.reshape(-1).view(torch.uint8).numpy()


def _words(tensor: Tensor) -> Any:
    data = _bytes(tensor)
    if len(data) % 2:
        data = np.append(data, np.uint8(0))
    return data.view("<u2").astype(np.float32)
