"""Parameters as one flat float32 vector: read, write, difference, norm, digest."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from atoll.errors import ConfigError
from atoll.task import Task


class Flat:
    """A model's tensors, read into and written from one flat float32 vector in main memory.

    The order of the tensors MUST be the same on every member.
    """

    def __init__(
        self, tensors: Sequence[Tensor], *, task: Task | None = None, whole: bool = False
    ) -> None:
        """Keep the tensors without copying.

        Args:
            tensors: What is read and written.
            task: The task of their model; it is notified of every read and write.
            whole: Whether these are all tensors that members agree on.
        """
        self.tensors = list(tensors)
        self._task, self._whole = task, whole
        self._lent: Tensor | None = None
        self.sizes = [tensor.numel() for tensor in self.tensors]
        self.num_elements = sum(self.sizes)

    @classmethod
    def of(cls, task: Task) -> Flat:
        """Return all tensors members agree on: trained parameters, then floating-point buffers."""
        return cls([*task.parameters(), *task.buffers()], task=task, whole=True)

    def new(self) -> Tensor:
        """Return an uninitialised vector of the right length."""
        return torch.empty(self.num_elements)

    def scratch(self) -> Tensor:
        """Return a reusable vector to read into and work in.

        Where the model only mirrors one that is trained elsewhere, this is the mirror's own memory:
        between two rounds it is not used otherwise, and it is refreshed when needed.
        """
        elsewhere = self._task.elsewhere if self._task is not None and self._whole else None
        self._lent = elsewhere.vector if elsewhere is not None else None
        return self.new() if self._lent is None else self._lent

    @torch.no_grad()
    def read(self, out: Tensor | None = None) -> Tensor:
        """Copy the tensors into `out`, or into a new vector, in one pass."""
        if self._task is not None:
            self._task.pull()
        vector = self.new() if out is None else out
        if self._lent is not None and out is self._lent:
            if self._task is not None and self._task.elsewhere is not None:
                self._task.elsewhere.spoil()
            return vector
        if self.tensors:
            torch._foreach_copy_(self.views(vector), self.tensors)
        return vector

    @torch.no_grad()
    def write(self, vector: Tensor) -> None:
        """Copy a vector into the tensors.

        Raises:
            ConfigError: the vector has another length.
        """
        if vector.numel() != self.num_elements:
            raise ConfigError(
                "a vector does not fit this model",
                given=f"{vector.numel()} elements",
                expected=f"{self.num_elements}",
                remedy="start every member with the same model",
            )
        if self._task is not None and not self._whole:
            self._task.pull()  # these tensors are a part: the others are pushed as they are
        if self.tensors:
            torch._foreach_copy_(self.tensors, self.views(vector))
        if self._task is not None:
            self._task.push()

    def views(self, vector: Tensor) -> list[Tensor]:
        """Return a vector's parts in the shapes of the tensors, sharing its memory."""
        parts = torch.split(vector, self.sizes)
        return [part.view(like.shape) for part, like in zip(parts, self.tensors, strict=True)]


def pseudo_gradient(start: Tensor, now: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the outer gradient `start - now`, float32, same shape as `start`.

    DiLoCo, Algorithm 1 (https://arxiv.org/abs/2311.08105). The sign is defined only here: an
    optimizer that subtracts the result moves towards the members. `out` may be `now` itself.

    Differs from the paper:
      * computed in float32 even when the model is bfloat16, so that small moves survive.
    """
    return torch.sub(start, now, out=out)


def length(vector: Tensor) -> float:
    """Return the Euclidean norm; NaN or infinite exactly when an element is.

    Reads memory once for both norm and finite check. Values are rescaled in a second pass only if
    their squares overflow or all underflow.
    """
    norm = float(torch.linalg.vector_norm(vector))
    if (math.isfinite(norm) and norm > 0.0) or not vector.numel():
        return norm
    largest = float(vector.abs().max())  # NaN wins
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    return largest * float(torch.linalg.vector_norm(vector / largest))


def digest(vector: Tensor) -> str:
    """Return 32 hex digits over the bytes of a contiguous vector (BLAKE2b).

    For a vector on torch's device `meta`, used to compute traffic, the digest is zeros.
    """
    if vector.is_meta:
        return "0" * 32
    data: Any = vector.detach().numpy()
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def iter_tensors(roots: list[Any]) -> Iterator[Tensor]:
    """Yield all tensors reachable from the attributes of strategies and codecs."""
    seen: set[int] = set()
    todo = list(roots)
    while todo:
        found = todo.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, Tensor):
            yield found
        elif isinstance(found, dict):
            todo += found.values()
        elif isinstance(found, list | tuple | set):
            todo += found
        elif type(found).__module__.startswith(("atoll.strategies", "atoll.codec")):
            slots = (s for kind in type(found).__mro__ for s in getattr(kind, "__slots__", ()))
            todo += [getattr(found, slot) for slot in slots if hasattr(found, slot)]
            todo += getattr(found, "__dict__", {}).values()
