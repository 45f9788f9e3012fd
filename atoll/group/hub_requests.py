"""A member's requests to the hub, which another thread can end at any time."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import TypeVar

from atoll.clock import RealClock
from atoll.errors import AtollError, DeadlineExceeded, HubError, PeerRefused, WireError
from atoll.net.sync_link import SLACK_S, SyncLink
from atoll.wire.messages import Event, Message, Roster, RosterReply, RoundPlan

M = TypeVar("M", bound=Message)

IDENTITIES_S = 20.0
"""Time limit of asking for the members' keys."""


class HubRequests:
    """Sends requests of one member. Thread-safe."""

    def __init__(self, link: SyncLink, *, patience_s: float) -> None:
        """Send over `link`; while it is disconnected a request fails after `patience_s`."""
        self._link, self._patience_s = link, patience_s
        # `end`, on another thread, must find every request that has passed its check.
        self._lock = threading.Lock()
        self._open: dict[Future[Message], type[Message]] = {}
        self._ended: dict[type[Message], AtollError] = {}

    def ask(self, body: Message, kind: type[M], *, deadline: float | None = None) -> M:
        """Return the hub's answer.

        While the hub is connected the wait ends only at the monotonic `deadline`, if given: the
        answer may depend on members that have not joined yet.

        Raises:
            DeadlineExceeded: the hub was unreachable for too long, or the deadline has passed.
            AtollError: the hub's error, or the one passed to :meth:`end`.
        """
        while True:
            timeout_s = self._patience_s
            if deadline is not None:
                timeout_s = max(0.0, deadline - RealClock().monotonic())
            try:
                reply = self._once(body, timeout_s)
            except DeadlineExceeded:
                if deadline is None and self._link.connected:
                    continue
                raise
            if not isinstance(reply, kind):
                raise WireError(
                    "the hub's answer has the wrong type",
                    given=type(reply).__name__, expected=kind.__name__,
                )  # fmt: skip
            return reply

    def identities(self) -> dict[str, str]:
        """Return the fingerprints of members' keys as the hub knows them now; raises as `ask`."""
        deadline = RealClock().monotonic() + IDENTITIES_S
        peers = self.ask(Roster(), RosterReply, deadline=deadline).peers
        return {peer.member: peer.identity for peer in peers if peer.identity}

    def tell(self, plan: RoundPlan, error: BaseException, *, me: str) -> None:
        """Raise an event if another member's data was unusable for the member `me`."""
        if isinstance(error, PeerRefused):
            fields = {"member": me, "round": str(plan.round), "route": plan.route}
            with suppress(AtollError):
                self._link.notify(Event(kind="result-refused", text=str(error), fields=fields))

    def end(self, error: AtollError, *kinds: type[Message]) -> None:
        """Make pending and later requests of these kinds raise `error`."""
        with self._lock:
            self._ended.update(dict.fromkeys(kinds, error))
            withdrawn = [future for future, kind in self._open.items() if kind in kinds]
        for future in withdrawn:
            future.cancel()

    def _once(self, body: Message, timeout_s: float) -> Message:
        kind = type(body)
        with self._lock:
            if kind in self._ended:
                raise self._ended[kind]
            future = self._link.request_later(body, timeout_s=timeout_s)
            self._open[future] = kind
        try:
            return future.result(timeout_s + SLACK_S)
        except CancelledError:
            with self._lock:
                error = self._ended.get(kind)
            raise error or HubError("this link to the hub was closed during a question") from None
        except TimeoutError:
            raise DeadlineExceeded("the hub did not answer", given=f"{timeout_s:.1f} s") from None
        finally:
            future.cancel()
            with self._lock:
                self._open.pop(future, None)
