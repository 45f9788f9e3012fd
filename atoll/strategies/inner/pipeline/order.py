"""Which pass a rank of an opportunistic pipeline does next. No torch.

Varuna (Athlur et al., https://arxiv.org/abs/2111.04007): if what the next pass of 1f1b needs has
not arrived, a rank does the next pass of the other kind, if that can begin. Passes of one kind keep
their order, so gradients are added up as in 1f1b, and are bitwise equal to it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Protocol, TypeVar


class Pass(Protocol):
    """A forward or backward pass of a microbatch."""

    @property
    def forward(self) -> bool:
        """Whether it is a forward pass."""
        ...


P = TypeVar("P", bound=Pass)


def next_pass(left: Iterable[P], *, ready: Container[P], held: int, most: int) -> P | None:
    """Return the pass to do now; None: wait.

    Args:
        left: What a rank still has to do, in the order of 1f1b.
        ready: What can begin: its input or gradient has arrived.
        held: Inputs of the stage that the rank keeps now for backward passes.
        most: The most that it may keep.
    """
    first: P | None = None
    for work in left:
        if first is None:
            first = work
            if work in ready:
                return work
        elif work.forward != first.forward:
            fits = not work.forward or held < most
            return work if fits and work in ready else None
    return None
