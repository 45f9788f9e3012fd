"""The keeper of an island: the process of a member that starts its ranks and ends them together.

It loads no torch and speaks to nobody. A rank that dies takes the island with it: the ranks meet in
collectives, which nobody can leave alone. The hub then launches the member again by the rules that
hold for every member, and its new ranks take the committed state over from the other members.

No rank outlives the keeper: the kernel kills them with it, and they are in its process group, which
the node agent kills in the end.
"""

from __future__ import annotations

import io
import json
import logging
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import cast

from atoll import config
from atoll.config import JobSpec, MeshShape, RankPlace, WorkerEnvironment
from atoll.errors import JobError, OutOfMemory
from atoll.node import parent
from atoll.node.exits import ERROR_FILE, count_oom_kills
from atoll.node.launchers.launcher import THREADS
from atoll.node.launchers.shares import usable_cpus
from atoll.node.losses import Losses, with_shape
from atoll.node.output import read_lines
from atoll.node.rank_ends import RankEnd, cause, died, error_file, explain

log = logging.getLogger(__name__)

HERE = "127.0.0.1"
SPEC_FILE = "island.toml"
"""The job file of the ranks where their mesh is not that of the job."""

PORT_TRIES = 3
SETTLE_S = 1.0
"""After a rank that only noticed the loss of another: how long that other one may take to end."""
HOME_S = 10.0
"""After the end of the first rank: how long the others may take to go home."""
LEAVE_S = 60.0
"""How long the first rank may take to leave when it is asked; the node agent has less patience."""
GONE_S = 5.0
"""How long the end of ranks that were killed, and their last lines, are waited for."""

PROGRAM = (sys.executable, "-m", "atoll.node.worker")


def keep(environment: WorkerEnvironment, spec: JobSpec, *, program: Sequence[str] = PROGRAM) -> int:
    """Run the ranks of an island to their end; return the member's exit status.

    To be called in the main thread, which the ranks live as long as.

    Args:
        environment: What the node agent told the member.
        spec: The job.
        program: What every rank runs.

    Raises:
        JobError: the machine cannot start so many processes.
    """
    folder = environment.directory
    losses = Losses.read(folder)
    shape = losses.shape(spec)
    asked = threading.Event()
    for left in reversed(range(PORT_TRIES)):
        with free_port() as port:
            island = Island(environment, shape, port=port, program=program, asked=asked)
            began, oom_kills = time.monotonic(), count_oom_kills()
            try:
                island.start(_spec_file(environment, spec, shape))
                end = island.wait()
            finally:
                island.close()
        if not (end.port_taken and left) or asked.is_set():
            break
        log.warning("port %d was taken meanwhile: the ranks start again", port)
    failed = not (end.good or asked.is_set())
    error = None
    if failed:
        killed = count_oom_kills() - oom_kills
        error = explain(end, member=environment.member, ranks=shape.ranks, oom_kills=killed)
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        with suppress(OSError):
            (folder / ERROR_FILE).write_text(json.dumps(error.to_dict()), encoding="utf-8")
    losses.after(
        died=error is not None and died(end, error),
        lacked_memory=isinstance(error, OutOfMemory),
        worked_s=time.monotonic() - began,
    ).write(folder)
    return end.status


class Island:
    """The ranks of one start."""

    def __init__(
        self,
        environment: WorkerEnvironment,
        shape: MeshShape,
        *,
        port: int,
        program: Sequence[str],
        asked: threading.Event,
    ) -> None:
        """Start nothing yet.

        Args:
            environment: What the node agent told the member.
            shape: How many ranks there are.
            port: Where the first rank will listen.
            program: What every rank runs.
            asked: Set when this process is asked to leave.
        """
        self._environment, self._shape, self._port = environment, shape, port
        self._program, self._asked = program, asked
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        self._news: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        """Rank and exit status of one that has ended; None: this process was asked to leave."""
        self._ends: list[RankEnd] = []

    # ------------------------------------------------------------------------- starting

    def start(self, spec_file: Path) -> None:
        """Start all ranks.

        Raises:
            JobError: the machine cannot.
        """
        signal.signal(signal.SIGTERM, self._hear)
        folder = self._environment.directory
        log.info("the island has %d ranks: %s", self._shape.ranks, self._shape)
        for rank in range(self._shape.ranks):
            with suppress(OSError):
                (folder / error_file(rank)).unlink(missing_ok=True)
            try:
                self._start_rank(rank, spec_file)
            except OSError as error:
                raise JobError(
                    "a machine cannot start the ranks of an island",
                    given=f"rank {rank} of {self._shape.ranks} ({error})",
                    remedy="look at the memory and the limits of that machine, or take fewer ranks",
                ) from error

    def _start_rank(self, rank: int, spec_file: Path) -> None:
        ranks = self._shape.ranks
        place = RankPlace(rank, ranks, local_rank=rank, address=HERE, port=self._port)
        popen = subprocess.Popen(
            self._program,
            env=config.rank_environment(
                place, defaults=_defaults(ranks), ATOLL_SPEC=str(spec_file)
            ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=parent.die_with_parent(),
        )
        self._ranks.append(popen)
        threading.Thread(target=self._await_end, args=(rank, popen), daemon=True).start()
        stream = cast(io.BufferedReader, popen.stdout)
        reader = threading.Thread(target=_pass_on, args=(rank, stream), daemon=True)
        reader.start()
        self._readers.append(reader)

    def _await_end(self, rank: int, popen: subprocess.Popen[bytes]) -> None:
        self._news.put((rank, popen.wait()))

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._asked.set()
        self._news.put(None)

    # -------------------------------------------------------------------------- watching

    def wait(self) -> RankEnd:
        """Return the end that decides how the island has ended; others may still live.

        That is the first rank's, unless one has failed by itself before.
        """
        patience: float | None = None
        while True:
            try:
                end = self._next_end(patience)
            except TimeoutError:
                return self._cause()
            if end is None:
                if patience is None:
                    self._ask_first()
                    patience = time.monotonic() + LEAVE_S
                continue
            asked = self._asked.is_set()
            if end.rank == 0 and (end.good or asked):
                self._send_home()
                return end
            if end.good or asked:
                continue  # the first rank will tell what that means
            if not end.follows or len(self._ends) == len(self._ranks):
                return self._cause()
            patience = patience or time.monotonic() + SETTLE_S

    def _next_end(self, deadline: float | None) -> RankEnd | None:
        """Wait for one more rank to end, and return how; None: this process was asked to leave.

        Raises:
            TimeoutError: none did.
        """
        try:
            news = self._news.get(timeout=None if deadline is None else _left_s(deadline))
        except queue.Empty:
            raise TimeoutError from None
        if news is None:
            return None
        end = RankEnd.read(*news, folder=self._environment.directory)
        log.log(
            logging.INFO if end.good else logging.WARNING,
            "rank %d has ended with %d", end.rank, end.code,
        )  # fmt: skip
        self._ends.append(end)
        return end

    def _cause(self) -> RankEnd:
        """Return the end that was the cause; a first rank that did not leave is killed now."""
        if all(end.good for end in self._ends):
            return RankEnd(0, -parent.KILL)
        return cause(self._ends)

    def _ask_first(self) -> None:
        """Ask the first rank to leave; what was stopped must run to hear of it."""
        parent.wake(process for popen in self._ranks for process in parent.tree(popen.pid)[:1])
        with suppress(ProcessLookupError):
            self._ranks[0].send_signal(signal.SIGTERM)

    def _send_home(self) -> None:
        """Give the others some time to end after the first one."""
        deadline = time.monotonic() + HOME_S
        with suppress(TimeoutError):
            while len(self._ends) < len(self._ranks):
                self._next_end(deadline)

    # ---------------------------------------------------------------------------- ending

    def close(self) -> None:
        """Kill what still lives, and everything it started; returns when all is gone."""
        families = [one for popen in self._ranks for one in parent.tree(popen.pid)]
        parent.signal_tree([*families, *parent.group_mates()], number=parent.KILL)
        deadline = time.monotonic() + GONE_S
        for popen in self._ranks:
            with suppress(subprocess.TimeoutExpired):
                popen.wait(timeout=_left_s(deadline))
        for reader in self._readers:
            reader.join(_left_s(deadline))


@contextmanager
def free_port() -> Iterator[int]:
    """Yield a port of this machine that nobody else is given inside.

    A socket that is bound but does not listen keeps it, while a process that names it can still
    listen there. Systems that do not let two sockets share a port so get one that was free just
    now.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((HERE, 0))
        port = int(held.getsockname()[1])
        if not sys.platform.startswith("linux"):
            held.close()
        yield port


def _spec_file(environment: WorkerEnvironment, spec: JobSpec, shape: MeshShape) -> Path:
    """Return the job file for ranks in a mesh."""
    if shape == spec.mesh:
        return environment.spec
    log.warning("ranks were lost: %s instead of %s", shape, spec.mesh)
    path = environment.directory / SPEC_FILE
    path.write_text(config.dump_spec(with_shape(spec, shape)), encoding="utf-8")
    return path


def _defaults(ranks: int) -> dict[str, str]:
    """Return variables that ranks get unless somebody has set them.

    Gloo would look up this machine's name and may find an interface that others can dial; numeric
    libraries would take all cores for every rank.
    """
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    found = {"GLOO_SOCKET_IFNAME": loopback} if loopback else {}
    return found | dict.fromkeys(THREADS, str(max(1, len(usable_cpus()) // ranks)))


def _left_s(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _pass_on(rank: int, stream: io.BufferedReader) -> None:
    """Pass the lines of a rank on, whole; those of all but the first are marked with its number."""
    mark = b"[rank %d] " % rank if rank else b""
    with stream:
        for line in read_lines(stream):
            sys.stdout.buffer.write(mark + line + b"\n")
            sys.stdout.buffer.flush()
