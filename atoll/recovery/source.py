"""A donor as seen by the recovering member: it answers requests, directly or over the relay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from atoll.errors import GroupError
from atoll.wire.recovery_messages import StateAnswer, StateAsk

SILENT_S = 12.0
"""A donor that sends nothing for this long is dropped. Busy machines stand still for seconds, and
if it is the only donor, its optimizer state is lost with it: no other one has it. Where there are
others, they take its chunks long before."""

LEAST_BYTES_S = 16 * 2**10
"""A source that sends less per second, over `SLOW_S`, is dropped."""

SLOW_S = 15.0

Take = Callable[[int, memoryview], None]
"""Called with index and bytes of every chunk, which are only valid during the call; raises
`SourceFailed` if they are wrong."""


class SourceFailed(GroupError):
    """A source cannot be used any more on any route; `what` names the reason."""


class SourceCorrupt(SourceFailed):
    """A source sent invalid data; all of its data is discarded."""


class SourceDiffers(SourceCorrupt):
    """A source's image differs from the majority's. Loading the state shows which is wrong."""


class SourceAdvanced(GroupError):
    """A source is not at the requested round."""

    def __init__(self, stands: int) -> None:
        """The source is at round `stands`; -1: at none yet."""
        super().__init__("the source is at another round", given=f"round {stands}")
        self.round = stands


class ConnectionBroken(GroupError):
    """This connection to a source is broken; another may work."""


class Source(Protocol):
    """One connection to one donor. Used by one thread; `close` may come from another."""

    def ask(self, ask: StateAsk) -> tuple[StateAnswer, memoryview]:
        """Return the answer to one request, and the bytes sent with it.

        Raises:
            ConnectionBroken: it cannot be reached on this connection.
            SourceFailed: it is gone or silent.
        """
        ...

    def fetch(self, round_: int, image: str, indices: Sequence[int], take: Take) -> None:
        """Receive chunks of an image, in any order; raises as `ask` does.

        Raises:
            SourceAdvanced: it does not have the image any more.
        """
        ...

    def close(self) -> None:
        """End all waits."""
        ...


def donor_refused(answer: StateAnswer) -> SourceFailed:
    """Return the error for a donor that does not serve its state."""
    return SourceFailed("it sends nothing", given=answer.reason[:300] or answer.status)
