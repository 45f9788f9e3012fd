"""Which members accept a connection of this one, found before a round and not during it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from atoll.clock import RealClock
from atoll.errors import AtollError
from atoll.group.base import Work
from atoll.group.hub_requests import HubRequests
from atoll.group.routes.rendezvous_store import probe_peers
from atoll.wire.messages import Peer, Roster, RosterReply
from atoll.wire.round_messages import MOST_LINES

log = logging.getLogger(__name__)

EARLY_S = 120.0
"""How long the members are awaited before the first round; later they are found in it."""
ASK_S = 0.5
"""Pause between two requests for the list of members."""


class ReachablePeers:
    """Asks the hub for the members' addresses and tries them, if the members have changed."""

    def __init__(self, requests: HubRequests, *, me: str) -> None:
        """Start without known members."""
        self._requests, self._me = requests, me
        self._lock = threading.Lock()
        """Held while addresses are tried, so that a round waits for that instead of repeating it.
        """
        self._began = threading.Event()
        """Set when the first round begins."""
        self.early = Work.of(None)
        """Done when the members of the first round were found, or the search has ended."""
        self._reachable: list[str] = []
        self._probed_for: tuple[str, ...] | None = None
        self._probed: frozenset[str] = frozenset()
        """Members whose addresses were tried, and this one."""

    def look(self, members: tuple[str, ...]) -> list[str]:
        """Return those that accept connections; `members` are those of the last plan.

        The first join probes all members that have registered: if these are the members of its
        plan, the next round does not probe again.
        """
        self._began.set()
        with self._lock:
            if self._probed_for == () and self._probed.issuperset(members):
                self._probed_for = members
            if self._probed_for != members:
                self._try(self._requests.ask(Roster(), RosterReply).peers)
                self._probed_for = members
            return self._reachable

    def look_early(self, wanted: int, *, then: Callable[[Sequence[Peer]], None]) -> None:
        """Wait on a thread until so many members are there, and try them, before the first round.

        If all of them can be reached, `then` connects with them: they will meet in that round.
        """

        def look() -> None:
            try:
                peers = self._all_of(wanted) if 1 < wanted <= MOST_LINES else []
            except AtollError as error:  # e.g. this member leaves
                log.debug("%s does not know yet whom it will meet: %s", self._me, error)
            else:
                if peers:
                    then(peers)

        self.early = Work.start(look, name="early")

    def _all_of(self, wanted: int) -> list[Peer]:
        """Return all members; none if some cannot be reached, or come after the round began."""
        deadline = RealClock().monotonic() + EARLY_S
        while RealClock().monotonic() < deadline:
            peers = self._requests.ask(Roster(), RosterReply, deadline=deadline).peers
            if len(peers) >= wanted and all(peer.dial for peer in peers):  # have registered
                with self._lock:
                    if self._began.is_set():
                        return []
                    self._try(peers)
                    self._probed_for = ()
                return peers if len(self._reachable) == len(peers) - 1 else []
            if self._began.wait(ASK_S):
                return []
        return []

    def forget(self) -> None:
        """Ask again before the next round."""
        with self._lock:
            self._probed_for = None

    def _try(self, peers: Sequence[Peer]) -> None:
        self._reachable = probe_peers({p.member: p.dial for p in peers if p.member != self._me})
        self._probed = frozenset([self._me, *(p.member for p in peers if p.dial)])
