"""Random faults on a running cluster, the same ones in the same order for the same seed.

What a fault hits is drawn from what runs at that moment, so two runs of a seed differ in that.
"""

from __future__ import annotations

import heapq
import itertools
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping

import psutil

from bench.chaos.proxy import Proxy
from bench.kit.cluster import Cluster

WEIGHTS = {
    "kill a worker": 4,
    "freeze a worker": 3,
    "freeze an agent": 2,
    "freeze the reducer": 2,
    "kill the reducer": 2,
    "kill the hub": 2,
    "cut a line": 4,
    "silence a line": 3,
    "slow a line": 3,
    "preempt a worker": 3,
    "kill an agent": 2,
    "kill two workers": 1,
}
FREEZE_S = (0.5, 12.0)
SILENCE_S = (0.5, 15.0)
SLOW_S = (3.0, 12.0)
SLOW_BPS = (2e5, 2e6)
SLOW_DELAY_S = (0.05, 0.3)
AWAY_S = (0.0, 4.0)
"""How long a killed hub or agent stays away."""


class Faults:
    """Brings faults about until it is stopped, then undoes what still holds."""

    def __init__(
        self,
        cluster: Cluster,
        proxies: Mapping[str, Proxy],
        *,
        job: str,
        seed: int,
        mean_s: float,
        merciless: bool = False,
    ) -> None:
        """Get ready.

        Args:
            cluster: What is hit; every node has a proxy between itself and the hub.
            proxies: By the name of the node.
            job: Id of the job; it says which workers have the state.
            seed: Of the order of faults and their lengths.
            mean_s: Mean time between two faults.
            merciless: Also kill the last workers that have the committed state; the run is then
                set back to its newest checkpoint.
        """
        self._cluster, self._proxies, self._job = cluster, proxies, job
        self._random = random.Random(seed)
        self._mean_s, self._merciless = mean_s, merciless
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self.done: Counter[str] = Counter()

    def run(self, *, deadline: float, ended: Callable[[], bool]) -> None:
        """Bring faults about until the deadline, or until `ended`; then let everything recover."""
        due = time.monotonic() + self._pause_s()
        while time.monotonic() < deadline and not ended():
            self._undo_due()
            if time.monotonic() >= due:
                self._one()
                due = time.monotonic() + self._pause_s()
            time.sleep(0.05)
        while self._later:
            heapq.heappop(self._later)[2]()

    def _pause_s(self) -> float:
        return min(self._random.expovariate(1 / self._mean_s), 4 * self._mean_s)

    def _one(self) -> None:
        """Bring about one fault, if there is something to hit."""
        kind = self._random.choices(list(WEIGHTS), weights=list(WEIGHTS.values()))[0]
        actions: dict[str, Callable[[], bool]] = {
            "kill a worker": lambda: self._kill_workers(1),
            "kill two workers": lambda: self._kill_workers(2),
            "preempt a worker": self._preempt,
            "freeze a worker": lambda: self._freeze(list(self._cluster.workers().values())),
            "freeze an agent": lambda: self._freeze(self._agents()),
            "freeze the reducer": lambda: self._freeze(self._cluster.reducers()),
            "kill the reducer": self._kill_reducer,
            "kill the hub": self._kill_hub,
            "cut a line": self._cut,
            "silence a line": self._silence,
            "slow a line": self._slow,
            "kill an agent": self._kill_agent,
        }
        if actions[kind]():
            self.done[kind] += 1
            sys.stderr.write(f"{time.strftime('%H:%M:%S')} {kind}\n")

    def _after(self, span: tuple[float, float], undo: Callable[[], None]) -> None:
        """Undo something after a random time."""
        at = time.monotonic() + self._random.uniform(*span)
        heapq.heappush(self._later, (at, next(self._count), undo))

    def _undo_due(self) -> None:
        while self._later and self._later[0][0] <= time.monotonic():
            heapq.heappop(self._later)[2]()

    # ------------------------------------------------------------------------- processes

    def _victims(self, count: int) -> list[psutil.Process]:
        """Return some workers at random, or none if too few would be left with the state."""
        workers = sorted(self._cluster.workers().items())
        if len(workers) < count:
            return []
        chosen = self._random.sample(workers, count)
        left = dict(worker for worker in workers if worker not in chosen)
        spared = self._merciless or self._one_has_the_state(left)
        return [process for _, process in chosen] if spared else []

    def _one_has_the_state(self, workers: Mapping[str, psutil.Process]) -> bool:
        """Return whether one of these runs and has been in a committed round since it started.

        Its age says nothing: on a busy machine it may take a minute until it has the state.
        """
        rounds: dict[str, float] = {}
        for point in self._cluster.lines(self._job, "metrics.jsonl"):
            if point["values"].get("contributors"):
                rounds[point["member"]] = point["time"]
        return any(_runs_before(p, rounds.get(member, 0.0)) for member, p in workers.items())

    def _kill_workers(self, count: int) -> bool:
        chosen = self._victims(count)
        for process in chosen:
            _send(process, signal.SIGKILL)
        return bool(chosen)

    def _preempt(self) -> bool:
        chosen = self._victims(1)
        for process in chosen:
            _send(process, signal.SIGTERM)
        return bool(chosen)

    def _agents(self) -> list[psutil.Process]:
        return [
            psutil.Process(popen.pid)
            for _, popen in sorted(self._cluster.nodes.items())
            if popen.poll() is None
        ]

    def _freeze(self, processes: list[psutil.Process]) -> bool:
        if not processes:
            return False
        process = self._random.choice(processes)
        _send(process, signal.SIGSTOP)
        self._after(FREEZE_S, lambda: _send(process, signal.SIGCONT))
        return True

    def _kill_reducer(self) -> bool:
        for process in self._cluster.reducers():
            _send(process, signal.SIGKILL)
            return True
        return False

    def _kill_hub(self) -> bool:
        hub = self._cluster.hub
        if hub is None or not self._end(hub):
            return False
        self._after(AWAY_S, self._cluster.start_hub)
        return True

    def _kill_agent(self) -> bool:
        name = self._random.choice(sorted(self._cluster.nodes))
        agent = self._cluster.nodes[name].pid
        workers = self._cluster.workers()
        left = {member: p for member, p in workers.items() if not _is_child_of(p, agent)}
        if not self._merciless and not self._one_has_the_state(left):
            return False
        if not self._end(self._cluster.nodes[name]):
            return False
        proxy = self._proxies[name]
        self._after(AWAY_S, lambda: start_node(self._cluster, name, proxy))
        return True

    def _end(self, popen: subprocess.Popen[str]) -> bool:
        """Kill a process of the cluster, which a later action starts again."""
        if popen.poll() is not None:
            return False  # it is away already
        popen.kill()
        popen.wait()
        if popen.stdout is not None:
            popen.stdout.close()
        return True

    # ------------------------------------------------------------------------------ lines

    def _line(self) -> Proxy:
        return self._proxies[self._random.choice(sorted(self._proxies))]

    def _cut(self) -> bool:
        self._line().cut()
        return True

    def _silence(self) -> bool:
        proxy = self._line()
        proxy.silence()
        self._after(SILENCE_S, proxy.speak)
        return True

    def _slow(self) -> bool:
        proxy = self._line()
        if proxy.rate_bps:
            return False
        usual_s = proxy.delay_s
        proxy.rate_bps = self._random.uniform(*SLOW_BPS)
        proxy.delay_s = self._random.uniform(*SLOW_DELAY_S)

        def restore() -> None:
            proxy.rate_bps, proxy.delay_s = 0.0, usual_s

        self._after(SLOW_S, restore)
        return True


def start_node(cluster: Cluster, name: str, proxy: Proxy) -> None:
    """Start an agent that knows the hub only through its proxy."""
    secret = cluster.ticket.rpartition("/")[2]
    cluster.start_node(name, ticket=f"atoll://127.0.0.1:{proxy.port}/{secret}")


def _runs_before(process: psutil.Process, time_: float) -> bool:
    """Return whether a process that is not frozen was started before this wall-clock time."""
    try:
        return process.create_time() < time_ and process.status() != psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def _is_child_of(process: psutil.Process, pid: int) -> bool:
    try:
        return process.ppid() == pid
    except psutil.NoSuchProcess:
        return True


def _send(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return
