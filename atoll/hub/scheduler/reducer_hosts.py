"""Keeps a reducer for every job that may relay: beside the hub, else on a node.

A job with several parameter servers has as many reducers; the first is its reducer. However one is
lost (its process exited, its node disconnected, the disk was full at the launch), a later check
launches another.
"""

from __future__ import annotations

import logging

from atoll.errors import AtollError
from atoll.hub.jobs.jobs import Job
from atoll.hub.nodes.services import JobServices
from atoll.hub.nodes.store import Node
from atoll.hub.scheduler.reducer_clients import FIRST_PAUSE_S, LONGEST_PAUSE_S, ReducerProcesses
from atoll.ids import REDUCER, reducer_id, session_id
from atoll.wire.messages import Launch, pack_command
from atoll.wire.states import JobState

log = logging.getLogger(__name__)

RETURN_S = 8.0
"""How long reducers of an earlier hub process may take to reconnect."""

START_S = 20.0
"""How long a launched reducer may take to connect before another one is launched. It doubles with
every launch: as the newer one replaces the older one, none would ever connect on a slow machine.
"""

LONGEST_START_S = 160.0

MOST_SERVERS = 64
"""Most parameter servers that are started for one job."""

Place = tuple[str, str]
"""A job, and the name of one of its reducers."""

STEADY_S = 60.0
"""A reducer that lived this long is replaced at once, others after growing pauses."""


class ReducerScheduler:
    """The reducers of all running jobs."""

    def __init__(self, services: JobServices, *, beside: ReducerProcesses | None) -> None:
        """`beside` is None when reducers are to run on nodes."""
        self._stores = services.stores
        self._jobs = services.stores.jobs
        self._sessions = services.sessions
        self._membership = services.membership
        self._rounds = services.rounds
        self._clock = services.clock
        self._beside = beside
        if beside is not None:
            beside.ended = self._end_session
        self._next: dict[Place, float] = {}
        """When a missing reducer is launched."""
        self._pause_s: dict[Place, float] = {}
        self._start_s: dict[Place, float] = {}
        """How long the next launch may take, if it is not the first one."""
        self._launched: dict[Place, tuple[float, str, int]] = {}
        """Time, node and attempt of the last launch by this hub process."""

    async def need(self, job: Job) -> None:
        """Keep the reducers of a job that starts."""
        for name in reducers_of(job):
            if self._beside is not None:
                self._beside.start(job.job, name)
            else:
                self._next[job.job, name] = self._clock.monotonic()
                await self._look_after(job, name)

    async def take_up(self, job: Job) -> None:
        """Keep the reducers of a job of an earlier hub process; they may reconnect."""
        if self._beside is not None:
            await self.need(job)
            return
        for name in reducers_of(job):
            self._next[job.job, name] = self._clock.monotonic() + RETURN_S

    async def lost(self, job: str, reducer: str) -> None:
        """Record that a reducer of a job is gone."""
        now, place = self._clock.monotonic(), (job, reducer)
        if self._beside is not None or not self._rounds.has(job):
            return
        launched_at, _, _ = self._launched.get(place, (-STEADY_S, "", 0))
        pause_s = self._pause_s.get(place, 0.0)
        if now - launched_at > STEADY_S:
            pause_s = 0.0
        self._pause_s[place] = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * pause_s))
        self._next[place] = now + pause_s
        await self._look_after(self._jobs.get(job), reducer)

    def where(self, job: str, reducer: str) -> str:
        """Return the node on which a reducer was launched; empty: beside the hub, or lost."""
        return self._launched.get((job, reducer), (0.0, "", 0))[1]

    def exited(self, job: str, reducer: str, attempt: int) -> None:
        """Record the exit of a reducer's process, reported by its node."""
        if not self._jobs.knows(job):
            return
        newest = self._jobs.get(job).reducer_attempt
        if attempt in (0, self._launched.get((job, reducer), (0.0, "", newest))[2]):
            self._end_session(job, reducer)

    async def tick(self) -> None:
        """Launch due reducers; called once a second."""
        for job in self._jobs.list():
            if job.state != JobState.RUNNING or self._beside is not None:
                continue
            for name in reducers_of(job):
                try:
                    await self._look_after(job, name)
                except AtollError as error:
                    log.error("no %s for %s yet: %s", name, job.job, error)

    async def stop(self, job: str) -> None:
        """End the reducers of a job that has ended."""
        for kept in (self._next, self._pause_s, self._start_s, self._launched):
            for place in [place for place in kept if place[0] == job]:
                kept.pop(place, None)
        for name in reducers_of(self._jobs.get(job)) or [REDUCER]:
            self._end_session(job, name)
        if self._beside is not None:
            await self._beside.stop(job)

    def _is_here(self, job: str, reducer: str) -> bool:
        if reducer == REDUCER:
            return self._rounds.machine(job).reducer_ready
        return self._sessions.get(session_id(job, reducer)) is not None

    async def _look_after(self, job: Job, reducer: str) -> None:
        place = (job.job, reducer)
        if not self._rounds.has(job.job):
            return
        if self._is_here(*place):
            self._start_s.pop(place, None)
            return
        now = self._clock.monotonic()
        _, node, _ = self._launched.get(place, (0.0, "", 0))
        where = self._membership.nodes.get(node)
        if where is not None and not where.connected:
            self._next[place] = now
            del self._launched[place]
        if now < self._next.setdefault(place, now):
            return
        start_s = self._start_s.get(place, START_S)
        self._next[place] = now + start_s  # before waiting, so that the next tick launches none
        launched = False
        try:
            launched = await self._launch(job, reducer)
        finally:
            if not launched and place in self._next:
                self._next[place] = now
        if launched:
            self._start_s[place] = min(2 * start_s, LONGEST_START_S)

    async def _launch(self, job: Job, reducer: str) -> bool:
        """Start a reducer on the fastest suitable node; False: there is none, or the job ended."""
        nodes = [node for node in self._membership.nodes.values() if node.connected]
        nodes = [node for node in nodes if not (node.draining or _paused(node))] or nodes
        if not nodes:
            return False
        nodes.sort(key=lambda node: (node.info.matmul_gflops, node.info.cores, node.node))
        best = nodes[-1 - reducers_of(job).index(reducer) % len(nodes)]
        attempt = job.reducer_attempt + 1
        await self._jobs.update(job.job, reducer_attempt=attempt)
        auth = self._stores.auth
        command = Launch(
            job=job.job,
            member=reducer,
            slot=0,
            token=await auth.issue_job_token(job.job, member=reducer, attempt=attempt),
            spec=job.text,
            files=await self._jobs.files_of(job.job),
            attempt=attempt,
        )
        if not self._rounds.has(job.job):
            await auth.revoke_job(job.job)
            return False
        await self._stores.queue.put(
            f"node/{best.node}",
            key=f"{job.job}/{reducer}/{attempt}",
            payload=pack_command(command),
        )
        self._launched[job.job, reducer] = (self._clock.monotonic(), best.node, attempt)
        text = f"the {reducer} runs on {best.node}"
        await self._stores.events.add(job.job, "reducer-placed", text)
        return True

    def _end_session(self, job: str, reducer: str) -> None:
        """End the session of a reducer whose process has ended; it cannot reconnect."""
        self._sessions.end(session_id(job, reducer))


def _paused(node: Node) -> bool:
    return node.info.offer is not None and bool(node.info.offer.paused)


def reducers_of(job: Job) -> list[str]:
    """Return the names of the reducers that a job needs; none if it cannot relay."""
    spec = job.spec
    if job.nodes_wanted == 1 and not spec.served:
        return []
    if spec.job.route == "direct" or spec.job.command:
        return []
    if spec.kind == "rl" and spec.alone:
        return []
    wanted = spec.strategy.options.get("servers", 1)
    number = wanted if isinstance(wanted, int) else 1
    return [reducer_id(n) for n in range(max(1, min(number, MOST_SERVERS)))]
