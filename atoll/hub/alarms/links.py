"""Which connections broke and came back, and when; bounded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

WINDOW_S = 600.0
_KEPT = 32


class Links:
    """Counts the returns of processes to the hub by machine."""

    def __init__(self) -> None:
        """Know nobody."""
        self._known: dict[str, str] = {}
        self._returns: dict[str, deque[float]] = {}

    def opened(self, address: str, incarnation: str, now: float) -> None:
        """Note a connection; the same process again had lost its last one."""
        if self._known.get(address) == incarnation:
            self._returns.setdefault(address, deque(maxlen=_KEPT)).append(now)
        else:
            self._known[address] = incarnation

    def count(self, address: str, now: float) -> int:
        """Return how often an address came back in the window."""
        times = self._returns.get(address)
        if times is None:
            return 0
        while times and times[0] < now - WINDOW_S:
            times.popleft()
        if not times:
            del self._returns[address]
        return len(times)

    def forget(self, is_gone: Callable[[str], bool]) -> None:
        """Drop the addresses that nobody will use again."""
        for address in [a for a in self._known if is_gone(a)]:
            del self._known[address]
            self._returns.pop(address, None)
