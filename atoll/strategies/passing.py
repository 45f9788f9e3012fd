"""A round of compressed differences that goes on beside a step: under way, taken, or saved.

A checkpoint cannot hold a thread, so it waits until the round has been decided and holds what came
of it; who loads that applies it at the same step as the others would have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from atoll.errors import AtollError
from atoll.group.agree import Transacted
from atoll.group.group import Work
from atoll.strategies.both_ways import Squeezed
from atoll.strategies.outer.lockstep import Came

Found = Came[tuple[Squeezed, Tensor | None]]
"""What a round's exchanges came to: the differences, and the mean of the buffers."""

_PENDING = "pending."


@dataclass(frozen=True, slots=True)
class Taken:
    """The result of a round, as it is applied or saved."""

    squeezed: Squeezed
    moved: Tensor
    """What the buffers move by."""
    contributors: tuple[str, ...]
    weight: float
    digest: str

    @classmethod
    def of(cls, found: Found, buffers: Tensor) -> Self:
        """Return what a round came to that began with these buffers."""
        squeezed, mean = found.value
        moved = torch.zeros_like(buffers) if mean is None else mean - buffers
        return cls(squeezed, moved, found.contributors, found.weight, found.digest)

    def state(self) -> dict[str, Tensor]:
        """Return it as part of a saved state; keys `shared.*` are equal on all members."""
        squeezed, owned = self.squeezed, self.squeezed.owned
        about = [self.digest, repr(self.weight), str(int(squeezed.alone)), *self.contributors]
        return {
            f"shared.{_PENDING}mean": squeezed.mean,
            f"shared.{_PENDING}about": torch.tensor(list(" ".join(about).encode())),
            f"own.{_PENDING}sent": squeezed.sent,
            f"own.{_PENDING}left": squeezed.left,
            f"own.{_PENDING}owned": torch.tensor([owned.start, owned.stop]),
            f"own.{_PENDING}moved": self.moved,
        }

    @classmethod
    def load(cls, state: Mapping[str, Tensor], *, buffers: int) -> Self | None:
        """Return what `state` held; None if nothing was pending.

        A member without a part of its own takes the common move as if it had sent just that.
        """
        about = state.get(f"shared.{_PENDING}about")
        if about is None:
            return None
        digest, weight, alone, *names = bytes(about.tolist()).decode().split(" ")
        mean = state[f"shared.{_PENDING}mean"].clone()
        start, stop = state.get(f"own.{_PENDING}owned", torch.zeros(2)).long().tolist()
        squeezed = Squeezed(
            mean, state.get(f"own.{_PENDING}sent", mean).clone(), slice(start, stop),
            state.get(f"own.{_PENDING}left", mean[:0]).clone(), alone=alone == "1",
        )  # fmt: skip
        moved = state.get(f"own.{_PENDING}moved", torch.zeros(buffers)).clone()
        return cls(squeezed, moved, tuple(names), float(weight), digest)


@dataclass(slots=True)
class Passing:
    """A round under way, or one whose result was loaded and waits to be taken."""

    positions: Tensor
    buffers: Tensor
    """As they were when it began."""
    prepare_s: float = 0.0
    work: Work[Transacted[Found]] | None = None
    loaded: Taken | None = None

    def pending(self) -> dict[str, Tensor]:
        """Return the result once it is there; nothing if there will be none."""
        if self.work is None:
            return {} if self.loaded is None else self.loaded.state()
        try:
            return Taken.of(self.work.wait().reduced, self.buffers).state()
        except AtollError:
            return {}  # whoever takes it learns why

    def end(self) -> None:
        """Wait until nothing is under way any more, whatever comes of it."""
        self.pending()
