"""Resident memory of everything in a cluster over time."""

from __future__ import annotations

import statistics
import threading
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import psutil

from bench.kit.cluster import Cluster

EVERY_S = 2.0
YOUNG_S = 15.0
"""A process that has just started is still loading; it is not counted."""

MEGABYTE = 1e6
ROLES = {
    "atoll.hub": "hub",
    "atoll.node": "agent",
    "atoll.node.worker": "worker",
    "atoll.reducer": "reducer",
}


@dataclass
class Memory:
    """Looks every two seconds, in a thread, as long as the block lasts."""

    cluster: Cluster
    samples: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """By role: when, and resident MB, the largest process of the role."""
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        """Start looking."""
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(10.0)

    def _run(self) -> None:
        while not self._stop.wait(EVERY_S):
            largest: dict[str, float] = {}
            for process in self.cluster.processes():
                try:
                    words, age_s = process.cmdline(), time.time() - process.create_time()
                    role = next((ROLES[word] for word in words if word in ROLES), "")
                    size = process.memory_info().rss / MEGABYTE
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
                if role and age_s > YOUNG_S:
                    largest[role] = max(size, largest.get(role, 0.0))
            now = time.monotonic()
            for role, size in largest.items():
                self.samples.setdefault(role, []).append((now, size))

    def growth_mb(self) -> dict[str, float]:
        """Return by role how much larger the last quarter's median is than the first quarter's."""
        found = {}
        for role, samples in self.samples.items():
            quarter = len(samples) // 4
            if quarter:
                sizes = [size for _, size in samples]
                late, early = (
                    statistics.median(sizes[-quarter:]),
                    statistics.median(sizes[:quarter]),
                )
                found[role] = round(late - early, 2)
        return found

    def largest_mb(self) -> dict[str, float]:
        """Return by role the largest size that was seen."""
        return {
            role: round(max(size for _, size in samples), 1)
            for role, samples in self.samples.items()
        }
