"""Where the first machines of islands await their hands; in the hub's memory only."""

from __future__ import annotations

from atoll.wire.messages import RendezvousAddress


class RendezvousRegistry:
    """The gate of every island whose first machine has opened one.

    They hold secrets, so nothing writes them anywhere: after a restart of the hub, or a new launch
    of the member, the island's first machine opens its gate again.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], RendezvousAddress] = {}

    def open(self, job: str, member: str, gate: RendezvousAddress) -> None:
        """Remember the gate of a member's island in the place of the one before."""
        self._open[job, member] = gate

    def get(self, job: str, member: str) -> RendezvousAddress | None:
        """Return the gate of a member's island, if it is open."""
        return self._open.get((job, member))

    def close(self, job: str, member: str) -> None:
        """Drop the gate of a member whose process is there no more."""
        self._open.pop((job, member), None)

    def forget(self, job: str) -> None:
        """Drop the gates of a job that has ended."""
        self._open = {key: gate for key, gate in self._open.items() if key[0] != job}
