"""A member's own part of the state: the tensors of its optimizer, as bytes in one order.

One line of JSON lists `[key, type, shape]` of each tensor, and `[key, "value", value]` of a plain
number; the bytes of the tensors follow. A key is `INDEX.NAME`: the parameter's number in the
optimizer's groups, and the name in its state. What the groups say (rates, decay) follows from the
job and the step, so it is not a part.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from atoll.digest import Digest
from atoll.errors import ConfigError, WireError

TYPES = {
    str(kind).removeprefix("torch."): kind
    for kind in (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)
}
VALUE = "value"
STEP = "step"
"""Name of the one tensor without its parameter's shape and type: the count of steps."""


def own_bytes(optimizer: Optimizer) -> Iterator[bytes | memoryview]:
    """Yield the own part in pieces; tensors are not copied, so read it before the next step.

    Raises:
        ConfigError: the optimizer keeps something else than tensors and numbers.
    """
    listed: list[list[Any]] = []
    tensors: list[Tensor] = []
    for index, parameter in enumerate(_parameters(optimizer)):
        for name, value in sorted(optimizer.state.get(parameter, {}).items()):
            key = f"{index}.{name}"
            if isinstance(value, Tensor) and str(value.dtype).removeprefix("torch.") in TYPES:
                listed.append([key, str(value.dtype).removeprefix("torch."), list(value.shape)])
                tensors.append(value)
            elif value is None or isinstance(value, bool | int | float):
                listed.append([key, VALUE, value])
            else:
                raise ConfigError(
                    "the state of this optimizer cannot be verified",
                    given=f"{name} is a {type(value).__name__}", expected="tensors and numbers",
                    remedy='optimizer = "adamw" or "sgd" in [train]',
                )  # fmt: skip
    yield json.dumps(listed, separators=(",", ":")).encode() + b"\n"
    for tensor in tensors:
        array: Any = tensor.detach().contiguous().numpy()
        yield memoryview(array).cast("B") if array.size else b""


def own_digest(optimizer: Optimizer) -> str:
    """Return the digest of an optimizer's tensors, 32 hex digits."""
    found = Digest()
    for piece in own_bytes(optimizer):
        found.update(piece)
    return found.hexdigest()


def bytes_digest(data: bytes) -> str:
    """Return the digest of an own part that was read."""
    return Digest(data).hexdigest()


def load_own(optimizer: Optimizer, data: bytes | memoryview) -> None:
    """Load an own part; what the optimizer had before is dropped.

    Raises:
        WireError: the bytes are no own part, or do not fit the optimizer's parameters.
    """
    parameters, view = list(_parameters(optimizer)), memoryview(data)
    found: dict[int, dict[str, Any]] = {}
    try:
        end = bytes(view[: 1 << 24]).index(b"\n") + 1
        for key, kind, what in json.loads(bytes(view[:end])):
            index, _, name = key.partition(".")
            state = found.setdefault(int(index), {})
            if kind == VALUE:
                state[name] = what
                continue
            dtype = TYPES[kind]
            whole = parameters[int(index)]
            # A fused kernel assumes its parameter's shape and type, and would write beyond the end.
            if name != STEP and (tuple(what), dtype) != (tuple(whole.shape), whole.dtype):
                raise ValueError(f"{name[:50]} has not the shape and type of its parameter")
            if name == STEP and (what or int(index) < 0):
                raise ValueError("the count of steps is no number")
            nbytes = int(np.prod(what, dtype=np.int64)) * torch.empty(0, dtype=dtype).element_size()
            piece = bytearray(view[end : end + nbytes])
            if len(piece) != nbytes:
                raise ValueError("it is cut off")
            state[name] = (
                torch.frombuffer(piece, dtype=dtype).reshape(what)
                if nbytes
                else torch.empty(what, dtype=dtype)
            )
            end += nbytes
        if end != len(view) or not found.keys() <= set(range(len(parameters))):
            raise ValueError("it has more than this optimizer's parameters")
    except (ValueError, LookupError, TypeError, RuntimeError, AttributeError) as error:
        raise WireError("this own part cannot be used", given=str(error)[:200]) from error
    optimizer.state.clear()
    for index, state in found.items():
        optimizer.state[parameters[index]] = state


def _parameters(optimizer: Optimizer) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield from group["params"]
