"""Rate limits per token, and per address without a token: requests above them are delayed.

They hold for all connections together: each session has a limit of its own, but a token may have
thousands of sessions, and requests by HTTP besides. Operators have no limit.
"""

from __future__ import annotations

from collections.abc import Iterable

from atoll.clock import Clock
from atoll.hub.quotas.ledger import REACHED_S, Holder, Ledger
from atoll.hub.quotas.limits import Kind
from atoll.hub.security.roles import Identity
from atoll.hub.sessions.request_meter import RequestMeter
from atoll.hub.sessions.session import Sessions

MOST_PAUSE_S = 20.0
"""Longest delay of a request; more than for one session, as a token may have thousands."""
STRANGERS_PER_S = 100.0
"""Requests of one address without a token in the long run: about 4 % of the hub's processor. A page
of the dashboard is 60 of them, once."""
STRANGER_PAUSE_S = 5.0
MOST = 1_024
"""Meters above which unused ones are dropped."""


class TokenMeters:
    """One meter per owner of a token."""

    def __init__(self, ledger: Ledger, sessions: Sessions, *, clock: Clock) -> None:
        """Apply the quota `requests_per_s`, or that of the owner's ticket."""
        sessions.pause_of, sessions.stranger_pause_of = self.pause_s, self.stranger_pause_s
        self._ledger, self._clock = ledger, clock
        self._meters: dict[Holder, RequestMeter] = {}
        self._strangers: dict[str, RequestMeter] = {}
        """By address."""
        ledger.sources.append(self._uses)

    def __len__(self) -> int:
        return len(self._meters) + len(self._strangers)

    def pause_s(self, identity: Identity, cost: float) -> float:
        """Count a request as so many frames; return the seconds to wait before it is handled."""
        if identity.role == "operator":
            return 0.0
        now = self._clock.monotonic()
        holder = Holder(identity.role, identity.name, identity.member)
        meter = self._meters.get(holder)
        if meter is None:
            if len(self._meters) >= MOST:
                self._meters = {h: one for h, one in self._meters.items() if not one.idle(now)}
            meter = RequestMeter(float(self._ledger.limit(Kind.REQUESTS, holder)))
            self._meters[holder] = meter
        return meter.took(now, cost, most_s=MOST_PAUSE_S)

    def stranger_pause_s(self, source: str) -> float:
        """Count a request or Hello of an address without a valid token; return as `pause_s`."""
        now = self._clock.monotonic()
        meter = self._strangers.get(source)
        if meter is None:
            if len(self._strangers) >= MOST:
                self._strangers = {s: m for s, m in self._strangers.items() if not m.idle(now)}
            if len(self._strangers) >= MOST:
                self._strangers.clear()  # so many at once are limited by their connections
            meter = self._strangers[source] = RequestMeter(STRANGERS_PER_S)
        return meter.took(now, most_s=STRANGER_PAUSE_S)

    async def _uses(self) -> Iterable[tuple[Kind, Holder, int]]:
        now = self._clock.monotonic()
        return [
            (Kind.REQUESTS, holder, round(meter.rate))
            for holder, meter in self._meters.items()
            if now - meter.limited_at < REACHED_S
        ]
