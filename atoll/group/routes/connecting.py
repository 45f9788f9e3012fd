"""Connecting the members of a meeting, perhaps in advance; another thread can end it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from atoll.errors import AtollError, PeerLost
from atoll.group.routes.line_group import LineGroup
from atoll.group.routes.rendezvous_store import RendezvousStore

LOOK_S = 0.05


class Connecting:
    """One attempt to connect. Thread-safe."""

    def __init__(self) -> None:
        """Begin."""
        self.over = False
        self._lock = threading.Lock()
        self._store: RendezvousStore | None = None

    def hold(self, store: RendezvousStore) -> None:
        """Close this connection to a store when the attempt ends; raises PeerLost if it has."""
        with self._lock:
            self._store = store
        self.check()

    def check(self) -> None:
        """Raise PeerLost if the attempt has ended."""
        if self.over:
            raise PeerLost("this exchange was abandoned", expected="another attempt is under way")

    def end(self) -> None:
        """End the attempt; a thread that waits for absent members fails at once."""
        with self._lock:
            self.over = True
            store, self._store = self._store, None
        if store is not None:
            store.close()


class PreparedGroup:
    """A process group that a thread connects before a round needs it."""

    def __init__(self, name: str, connect: Callable[[Connecting], Any]) -> None:
        """Begin to connect the meeting of this name."""
        self.name = name
        self._connecting = Connecting()
        self._lock = threading.Lock()
        self._group: Any | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._run, args=(connect,), name="prepare", daemon=True).start()

    def take(self, name: str, *, over: Callable[[], bool]) -> Any | None:
        """Return the group of a meeting, once it is connected; None: there is none.

        The wait ends when connecting does, or when `over`. What was prepared for another meeting is
        dropped.
        """
        if name != self.name:
            self.drop()
            return None
        while not self._ended.wait(LOOK_S):
            if over():
                self.drop()
                return None
        with self._lock:
            group, self._group = self._group, None
        return group

    def drop(self) -> None:
        """Give up connecting; close what is connected."""
        self._connecting.end()
        with self._lock:
            group, self._group = self._group, None
        close_group(group)

    def _run(self, connect: Callable[[Connecting], Any]) -> None:
        try:
            group = connect(self._connecting)
        except (AtollError, RuntimeError, OSError):
            pass  # the round connects again, and reports what is wrong
        else:
            with self._lock:
                if not self._connecting.over:
                    self._group, group = group, None
            close_group(group)
        finally:
            self._ended.set()


def close_group(group: Any | None) -> None:
    """Close the connections of a group, if there is one; does not block."""
    if isinstance(group, LineGroup):
        group.close()
    elif group is not None:
        # Gloo's destructor blocks until pending operations end, so it runs on another thread.
        threading.Thread(target=lambda held: held.clear(), args=([group],), daemon=True).start()
