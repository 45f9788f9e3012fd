"""Convert nested state (any `state_dict()`) to flat tensors and JSON and back, without pickle.

    {"state": {0: {"exp_avg": T}}, "lr": 0.1}
        ->  tensors  {"optimizer/state/0/exp_avg": T}
            tree     {"state": {"$": "dict", "items": [[0, {"exp_avg": {"$": "tensor", ...

JSON has objects with string keys, lists, strings, numbers, true, false and null. Everything else is
an object whose key `$` names its type: tensor, array, dict (other keys), tuple, bytes, float (not
finite). Types are restored; numpy scalars become Python's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.errors import CheckpointCorrupt, CheckpointError
from atoll.task import RemoteState

TREE = "tree"
"""Key in a part's metadata: the JSON of its state."""

_KIND = "$"


def flatten(state: Any, *, prefix: str) -> tuple[dict[str, Any], str]:
    """Return the tensors in `state`, named below `prefix`, and the rest as JSON.

    Tensors that share all their memory are stored once. Nothing is copied; :class:`RemoteState` is
    kept as it is.

    Raises:
        CheckpointError: something in it cannot be saved; its path is named.
    """
    flattener = _Flattener()
    tree = flattener.visit(state, prefix)
    return flattener.tensors, json.dumps(tree, allow_nan=False, separators=(",", ":"))


def nest(tree: str, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state from the results of `flatten`.

    Raises:
        CheckpointCorrupt: the JSON is malformed or names a missing tensor.
    """
    try:
        return _nest(json.loads(tree), tensors)
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise CheckpointCorrupt(
            "the state in a checkpoint is malformed", given=f"{type(error).__name__}: {error}"
        ) from error


class _Flattener:
    """Walks a state once and records its tensors."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor | RemoteState] = {}
        self._names: dict[tuple[object, ...], str] = {}

    def visit(self, value: Any, path: str) -> Any:
        """Return the JSON form of a value."""
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, int):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {_KIND: "float", "value": repr(value)}
        if isinstance(value, Tensor):
            return {_KIND: "tensor", "name": self._add(value.detach(), path)}
        if isinstance(value, RemoteState):
            return {_KIND: "tensor", "name": self._named(value, path)}
        if isinstance(value, np.ndarray):
            return {_KIND: "array", "name": self._add(torch.tensor(value), path)}
        if isinstance(value, bytes):
            data = torch.tensor(list(value), dtype=torch.uint8)
            return {_KIND: "bytes", "name": self._add(data, path)}
        return self._container(value, path)

    def _container(self, value: Any, path: str) -> Any:
        """Return the JSON form of a mapping, list or tuple."""
        if isinstance(value, Mapping):
            items = [[self._key(k, path), self.visit(v, f"{path}/{k}")] for k, v in value.items()]
            if all(isinstance(key, str) for key in value) and _KIND not in value:
                return dict(items)
            return {_KIND: "dict", "items": items}
        if isinstance(value, list | tuple):
            listed = [self.visit(item, f"{path}/{index}") for index, item in enumerate(value)]
            return {_KIND: "tuple", "items": listed} if isinstance(value, tuple) else listed
        raise _cannot_save(value, path)

    def _key(self, key: object, path: str) -> object:
        if isinstance(key, str | int) and not isinstance(key, bool):
            return key
        raise _cannot_save(key, f"a key of {path}")

    def _add(self, tensor: Tensor, path: str) -> str:
        """Return the name under which a tensor is stored."""
        if tensor.layout != torch.strided:
            raise _cannot_save(tensor, path)
        where: object = tensor.data_ptr()
        if tensor.is_meta:  # shapes alone have no address
            where = tensor.untyped_storage()._cdata, tensor.storage_offset()
        same = (where, tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        if tensor.numel() == 0 or same not in self._names:
            self._names[same] = self._named(tensor, path)
        return self._names[same]

    def _named(self, tensor: Tensor | RemoteState, path: str) -> str:
        """Store a tensor under a unique name, and return that."""
        name = path
        while name in self.tensors:  # keys 1 and "1" beside each other
            name += "'"
        self.tensors[name] = tensor
        return name


def _cannot_save(value: object, path: str) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be saved",
        given=f"{type(value).__module__}.{type(value).__qualname__}",
        expected="tensors, numbers, strings, None, and dicts, lists and tuples of them",
        remedy="return these from state_dict()",
    )


def _nest(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(tree, list):
        return [_nest(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if _KIND in tree:
        return _READERS[tree[_KIND]](tree, tensors)
    return {key: _nest(value, tensors) for key, value in tree.items()}


_Reader = Callable[[dict[str, Any], Mapping[str, Tensor]], Any]
_READERS: Mapping[str, _Reader] = {
    "tensor": lambda tree, tensors: tensors[tree["name"]],
    "array": lambda tree, tensors: tensors[tree["name"]].numpy().copy(),
    "bytes": lambda tree, tensors: tensors[tree["name"]].numpy().tobytes(),
    "float": lambda tree, _: float(tree["value"]),
    "tuple": lambda tree, tensors: tuple(_nest(item, tensors) for item in tree["items"]),
    "dict": lambda tree, tensors: {key: _nest(value, tensors) for key, value in tree["items"]},
}
