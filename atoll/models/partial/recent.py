"""The values of the newest tensors that are not kept, for code that looks at them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from atoll.models.partial.call import key_of

KEPT = 8
"""Values are kept up to the size of so many of the largest tensor."""


class RecentValues:
    """Memory of tensors on meta, by their storage; the oldest is freed first."""

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._held: OrderedDict[int, Any] = OrderedDict()
        self._largest = 0

    def put(self, absent: Tensor, real: Tensor) -> None:
        """Keep the values of a tensor on meta; `real` has all of its memory."""
        storage = real.untyped_storage()
        self._held[key_of(absent)] = storage
        self._held.move_to_end(key_of(absent))
        self._largest = max(self._largest, storage.nbytes())
        while sum(held.nbytes() for held in self._held.values()) > KEPT * self._largest:
            self._held.popitem(last=False)

    def has(self, tensor: Tensor) -> bool:
        """Return whether a tensor has values."""
        return not tensor.is_meta or key_of(tensor) in self._held

    def get(self, tensor: Tensor) -> Tensor:
        """Return a tensor's values, in memory that is shared; KeyError if they are gone."""
        if not tensor.is_meta:
            return tensor
        self._held.move_to_end(key_of(tensor))
        made = torch.empty(0, dtype=tensor.dtype, device="cpu")
        made.set_(
            self._held[key_of(tensor)], tensor.storage_offset(), tensor.shape, tensor.stride()
        )
        return made
