"""A donor as the asker sees it: something that answers asks, on one way or the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from atoll.errors import GroupError
from atoll.wire.recovery_messages import StateAnswer, StateAsk

SILENT_S = 5.0
"""A direct source that sends nothing for so long is given up. Its chunks go to others, so that a
wrong guess costs little."""

LEAST_BYTES_S = 16 * 2**10
"""A source that sends less per second, over `SLOW_S`, is given up."""

SLOW_S = 15.0

Take = Callable[[int, memoryview], None]
"""Called with index and bytes of every chunk, which are only valid during the call; raises
`SourceFailed` if they are wrong."""


class SourceFailed(GroupError):
    """A source is of no use any more, whatever way it is asked on; `what` names the reason."""


class SourceCorrupt(SourceFailed):
    """A source sent what it must not; nothing of it is believed."""


class SourceDiffers(SourceCorrupt):
    """What a source has is not what most have. Who is wrong shows when the state is loaded."""


class SourceAdvanced(GroupError):
    """A source does not stand on the round that was asked for."""

    def __init__(self, stands: int) -> None:
        """It stands on another round; -1: on none yet."""
        super().__init__("the source stands on another round", given=f"round {stands}")
        self.round = stands


class ConnectionBroken(GroupError):
    """This way to a source is broken; another may not be."""


class Source(Protocol):
    """One way to one donor. Used by one thread; `close` may come from another."""

    def ask(self, ask: StateAsk) -> tuple[StateAnswer, memoryview]:
        """Return the answer to one ask, and what came with it.

        Raises:
            WayBroken: it cannot be reached on this way.
            SourceFailed: it is gone or silent.
        """
        ...

    def fetch(self, round_: int, image: str, indices: Sequence[int], take: Take) -> None:
        """Hand over chunks of an image, in whatever order they come; raises as `ask` does.

        Raises:
            SourceMoved: it does not have the image any more.
        """
        ...

    def close(self) -> None:
        """End every wait."""
        ...


def donor_refused(answer: StateAnswer) -> SourceFailed:
    """Return the error for a donor that does not give its state."""
    return SourceFailed("it gives nothing", given=answer.reason[:300] or answer.status)
