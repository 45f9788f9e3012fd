"""Sees to it that every job that may relay has a reducer: beside the hub, else on a node.

Whatever becomes of one (it exited, its node went away, the disk was full when it was to be
launched), a later look finds the job without a reducer and launches another.
"""

from __future__ import annotations

import logging

from atoll.clock import Clock
from atoll.config import parse_spec
from atoll.errors import AtollError
from atoll.hub.jobs import Job
from atoll.hub.membership import Membership, Node
from atoll.hub.reducers import FIRST_PAUSE_S, LONGEST_PAUSE_S, Reducers
from atoll.hub.rounds import Rounds
from atoll.hub.session import Sessions
from atoll.hub.stores import Stores
from atoll.ids import session_id
from atoll.wire.messages import Launch, pack_command

log = logging.getLogger(__name__)

RETURN_S = 8.0
"""How long the reducers of an earlier life of the hub may take to come back."""

START_S = 20.0
"""How long a launched reducer may take to connect before another one is launched."""

STEADY_S = 60.0
"""A reducer that was launched so long ago is replaced at once, others after growing pauses."""


class ReducerPlaces:
    """The reducers of all running jobs."""

    def __init__(
        self,
        *,
        stores: Stores,
        sessions: Sessions,
        membership: Membership,
        rounds: Rounds,
        clock: Clock,
        beside: Reducers | None,
    ) -> None:
        """`beside` is None when reducers are to run on nodes."""
        self._stores = stores
        self._jobs = stores.jobs
        self._sessions = sessions
        self._membership = membership
        self._rounds = rounds
        self._clock = clock
        self._beside = beside
        if beside is not None:
            beside.ended = self._end_session
        self._next: dict[str, float] = {}
        """When a job without a reducer gets one."""
        self._pause_s: dict[str, float] = {}
        self._launched: dict[str, tuple[float, str]] = {}
        """When and where the last one was launched in this life of the hub."""

    async def need(self, job: Job) -> None:
        """See to a reducer for a job that starts."""
        if not _may_relay(job):
            return
        if self._beside is not None:
            self._beside.start(job.job)
        else:
            self._next[job.job] = self._clock.monotonic()
            await self._look_after(job)

    async def take_up(self, job: Job) -> None:
        """Take up a job of an earlier life of the hub, whose reducer may come back by itself."""
        if self._beside is not None:
            await self.need(job)
        elif _may_relay(job):
            self._next[job.job] = self._clock.monotonic() + RETURN_S

    async def lost(self, job: str) -> None:
        """The reducer of a job is gone."""
        now = self._clock.monotonic()
        if self._beside is not None or not self._rounds.has(job):
            return
        launched_at, _ = self._launched.get(job, (-STEADY_S, ""))
        pause_s = self._pause_s.get(job, 0.0)
        if now - launched_at > STEADY_S:
            pause_s = 0.0
        self._pause_s[job] = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * pause_s))
        self._next[job] = now + pause_s
        await self._look_after(self._jobs.get(job))

    def where(self, job: str) -> str:
        """Return the node that was asked to run a job's reducer; empty: beside the hub, or lost."""
        return self._launched.get(job, (0.0, ""))[1]

    def exited(self, job: str, attempt: int) -> None:
        """A node tells that the process of a reducer has ended."""
        if self._jobs.knows(job) and attempt in (0, self._jobs.get(job).reducer_attempt):
            self._end_session(job)

    async def tick(self) -> None:
        """Launch what is due; called once a second."""
        for job in self._jobs.list():
            if job.state == "running" and _may_relay(job) and self._beside is None:
                try:
                    await self._look_after(job)
                except AtollError as error:
                    log.error("no reducer for %s yet: %s", job.job, error)

    async def stop(self, job: str) -> None:
        """End the reducer of a job that has ended."""
        for kept in (self._next, self._pause_s, self._launched):
            kept.pop(job, None)
        self._end_session(job)
        if self._beside is not None:
            await self._beside.stop(job)

    async def _look_after(self, job: Job) -> None:
        if not self._rounds.has(job.job) or self._rounds.machine(job.job).reducer_ready:
            return
        now = self._clock.monotonic()
        _, node = self._launched.get(job.job, (0.0, ""))
        where = self._membership.nodes.get(node)
        if where is not None and not where.connected:
            self._next[job.job] = now
            del self._launched[job.job]
        if now >= self._next.setdefault(job.job, now) and await self._launch(job):
            self._next[job.job] = now + START_S

    async def _launch(self, job: Job) -> bool:
        """Start the reducer on the node that computes fastest; return whether there is any."""
        nodes = [node for node in self._membership.nodes.values() if node.connected]
        nodes = [node for node in nodes if not (node.draining or _paused(node))] or nodes
        if not nodes:
            return False
        best = max(nodes, key=lambda node: (node.info.matmul_gflops, node.info.cores, node.node))
        attempt = job.reducer_attempt + 1
        await self._jobs.update(job.job, reducer_attempt=attempt)
        auth = self._stores.auth
        command = Launch(
            job=job.job,
            member="reducer",
            slot=0,
            token=await auth.issue_job_token(job.job, member="reducer", attempt=attempt),
            spec=job.spec,
            files=await self._jobs.files_of(job.job),
            attempt=attempt,
        )
        await self._stores.queue.put(
            f"node/{best.node}",
            key=f"{job.job}/reducer/{attempt}",
            payload=pack_command(command),
        )
        self._launched[job.job] = (self._clock.monotonic(), best.node)
        text = f"the reducer runs on {best.node}"
        await self._stores.events.add(job.job, "reducer-placed", text)
        return True

    def _end_session(self, job: str) -> None:
        """End the session of a reducer whose process has ended: nobody waits for it to return."""
        self._sessions.end(session_id(job, "reducer"))


def _paused(node: Node) -> bool:
    return node.info.offer is not None and bool(node.info.offer.paused)


def _may_relay(job: Job) -> bool:
    if job.nodes_wanted == 1:
        return False
    spec = parse_spec(job.spec)
    return spec.job.route != "direct" and not spec.job.command
