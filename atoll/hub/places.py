"""The nodes as places for processes: what each has left beside what runs there."""

from __future__ import annotations

from collections.abc import Collection

from atoll.config import parse_spec
from atoll.hub.fitting import Place, Taken, Want, want_of
from atoll.hub.jobs import LIVE_STATES, Job, Jobs
from atoll.hub.membership import Membership
from atoll.hub.session import Sessions


class Places:
    """Puts together who is there, what it measured, and what jobs have reserved of it."""

    def __init__(self, *, jobs: Jobs, membership: Membership, sessions: Sessions) -> None:
        self._jobs = jobs
        self._membership = membership
        self._sessions = sessions
        self._wants: dict[str, tuple[str, Want, bool]] = {}
        """Job -> its text, what that asks for, whether it shrinks: reading TOML is slow."""

    def want(self, job: Job) -> Want:
        """Return what one process of a job asks of a node."""
        return self._read(job)[1]

    def shrinks(self, job: Job) -> bool:
        """Return whether an island of a job works on without some of its machines."""
        return self._read(job)[2]

    def _read(self, job: Job) -> tuple[str, Want, bool]:
        known = self._wants.get(job.job)
        if known is None or known[0] is not job.spec:
            spec = parse_spec(job.spec)
            shrinks = spec.island.on_loss == "shrink"
            known = self._wants[job.job] = (job.spec, want_of(spec), shrinks)
        return known

    def forget(self, job: str) -> None:
        """Drop what concerns a job that has ended."""
        self._wants.pop(job, None)

    def now(self, *, pausing: Collection[tuple[str, str]] = ()) -> list[Place]:
        """Return every known node.

        Args:
            pausing: Job and member of processes that will be started again after a pause; they
                keep their places.
        """
        taken: dict[str, Taken] = {}
        for job in self._jobs.list():
            for member in job.processes if job.state == "running" else ():
                if member.state in LIVE_STATES or (job.job, member.member) in pausing:
                    before = taken.get(member.node, Taken())
                    want = self.want(job)
                    taken[member.node] = before.plus(want.needs, gpus=want.gpus)
        places = []
        for node in self._membership.nodes.values():
            session = self._sessions.get(node.node)
            why = (node.drain_reason or "it is asked to") if node.draining else ""
            places.append(
                Place(
                    node=node.node,
                    info=node.info,
                    connected=node.connected,
                    draining=why,
                    stats=session.stats if session is not None else node.stats,
                    taken=taken.get(node.node, Taken()),
                    source=session.source if session is not None else "",
                )
            )
        return places
