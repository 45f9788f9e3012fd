"""Rendezvous addresses of islands, in the hub's memory only."""

from __future__ import annotations

from atoll.wire.messages import RendezvousAddress


class RendezvousRegistry:
    """The rendezvous address of every island that has published one.

    The addresses hold secrets and are not stored: after a restart of the hub, or a new launch of
    the member, the island's first machine publishes a new one.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], RendezvousAddress] = {}

    def open(self, job: str, member: str, address: RendezvousAddress) -> None:
        """Store the address for a member's island, replacing an earlier one."""
        self._open[job, member] = address

    def get(self, job: str, member: str) -> RendezvousAddress | None:
        """Return the address for a member's island, if it is known."""
        return self._open.get((job, member))

    def close(self, job: str, member: str) -> None:
        """Drop the address for a member whose process has ended."""
        self._open.pop((job, member), None)

    def forget(self, job: str) -> None:
        """Drop the addresses of a job that has ended."""
        self._open = {key: address for key, address in self._open.items() if key[0] != job}
