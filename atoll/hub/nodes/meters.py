"""Reports to the quotas what only sessions know: memory of reducers, frames of processes."""

from __future__ import annotations

from atoll.clock import Clock
from atoll.hub.quotas.ledger import REACHED_S, Holder, Ledger
from atoll.hub.quotas.limits import Kind
from atoll.hub.sessions.session import Session, Sessions
from atoll.ids import is_reducer

_OF_REDUCERS = (Kind.REDUCER_MEMBER, Kind.REDUCER_JOB)
_Use = tuple[Kind, Holder, int]

MAX_FIGURE = 1e18
"""Figures from this on are ignored: a process on another machine may report any number."""


class SessionMeters:
    """Reads figures of sessions for the ledger, and sends processes their limits."""

    def __init__(self, ledger: Ledger, sessions: Sessions, *, clock: Clock) -> None:
        self._ledger = ledger
        self._sessions = sessions
        self._clock = clock
        self._refused: dict[tuple[str, str], float] = {}
        """Refusals that a reducer has reported, by its incarnation and the figure's name."""
        sessions.limits_of = self.limits_of
        sessions.frames_per_s = float(ledger.quotas.frames_per_s)
        ledger.sources.append(self._uses)

    def limits_of(self, address: str) -> dict[str, int]:
        """Return the limits of the process at an address: of memory for a reducer, else none."""
        if not is_reducer(address.partition("/")[2]):
            return {}
        return {kind.value: self._ledger.quotas.of(kind) for kind in _OF_REDUCERS}

    async def _uses(self) -> list[_Use]:
        found: list[_Use] = []
        now = self._clock.monotonic()
        seen = set()
        for session in self._sessions.all():
            if session.job and is_reducer(session.member):
                found += self._of_reducer(session)
                seen.add(session.incarnation)
            if now - session.meter.limited_at < REACHED_S:
                limit = self._ledger.quotas.frames_per_s
                found.append((Kind.FRAMES, _holder_of(session), limit))
        self._refused = {key: n for key, n in self._refused.items() if key[0] in seen}
        return found

    def _of_reducer(self, session: Session) -> list[_Use]:
        found: list[_Use] = []
        for name, value in session.stats.items():
            figure, _, member = name.partition("/")
            kind = Kind.REDUCER_MEMBER if member else Kind.REDUCER_JOB
            holder = Holder("job", session.job, member)
            if not 0 <= value < MAX_FIGURE:
                continue
            if figure == "held_bytes":
                found.append((kind, holder, int(value)))
            elif figure == "refused":
                key = (session.incarnation, name)
                if (more := value - self._refused.get(key, 0.0)) > 0:
                    self._refused[key] = value
                    held = session.stats.get(name.replace("refused", "held_bytes"), 0.0)
                    used = int(held) if 0 <= held < MAX_FIGURE else 0
                    self._ledger.note(kind, holder, used=used, times=int(more))
        return found


def _holder_of(session: Session) -> Holder:
    if session.job:
        return Holder("job", session.job, session.member)
    return Holder(session.identity.role, session.address)
