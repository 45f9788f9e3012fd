"""The ranks of an island on this host: started, monitored and killed together.

No rank outlives the process that started it: the kernel kills them with it, and they are in its
process group, which the node agent kills in the end.
"""

from __future__ import annotations

import io
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast

from atoll import config, system
from atoll.config import RankPlace
from atoll.errors import JobError
from atoll.island.start_phase import RankPhase, phase_file
from atoll.node.islands.failure_cause import RankExit, error_file
from atoll.node.launchers.launcher import THREADS
from atoll.node.machine.interfaces import interface_of, is_loopback
from atoll.node.processes import process_tree
from atoll.node.processes.output import read_lines

log = logging.getLogger(__name__)

GONE_S = 5.0
"""How long to wait for the end of killed ranks and for their last lines."""

PROGRAM = (sys.executable, "-P", "-m", "atoll.node.worker")

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""Environment variables for the network interface of communication libraries."""


class LocalRanks:
    """The ranks of one start on this host. Use it in the main thread only.

    A process that dies with its parent dies with the thread that started it.
    """

    def __init__(
        self, folder: Path, *, program: Sequence[str], on_end: Callable[[RankExit], None]
    ) -> None:
        """Prepare to run `program` as every rank.

        Each rank stores its error in `folder`; `on_end` is called with every exit, on its own
        thread.
        """
        self._folder, self._program, self._on_end = folder, program, on_end
        self._ranks: dict[int, subprocess.Popen[bytes]] = {}
        self._readers: list[threading.Thread] = []
        self._oom_kills = system.count_oom_kills()

    def start(self, places: Sequence[RankPlace], *, own_address: str, **more: str) -> None:
        """Start ranks that meet at `own_address`, with additional variables; raises JobError."""
        defaults = _defaults(len(places), own_address)
        for place in places:
            with suppress(OSError):
                (self._folder / error_file(place.rank)).unlink(missing_ok=True)
                (self._folder / phase_file(place.rank)).unlink(missing_ok=True)
            try:
                self._start(place, {**config.rank_environment(place, defaults=defaults), **more})
            except OSError as error:
                raise JobError(
                    "a machine cannot start the ranks of an island",
                    given=f"rank {place.rank} of {place.ranks} ({error})",
                    remedy="look at the memory and the limits of that machine, or take fewer ranks",
                ) from error

    def phases(self) -> dict[int, RankPhase]:
        """Return the startup progress of each rank."""
        return {rank: RankPhase.read(self._folder, rank) for rank in self._ranks}

    def ask(self, rank: int) -> None:
        """Ask a rank to leave; continues ranks stopped by SIGSTOP, which would not react."""
        process_tree.wake(
            one for popen in self._ranks.values() for one in process_tree.tree(popen.pid)[:1]
        )
        with suppress(ProcessLookupError):
            self._ranks[rank].send_signal(signal.SIGTERM)

    def close(self) -> None:
        """Kill all ranks and everything they started, and wait until they are gone."""
        families = [one for popen in self._ranks.values() for one in process_tree.tree(popen.pid)]
        process_tree.signal_tree([*families, *process_tree.group_mates()], number=system.KILL)
        deadline = time.monotonic() + GONE_S
        for popen in self._ranks.values():
            with suppress(subprocess.TimeoutExpired):
                popen.wait(timeout=max(0.0, deadline - time.monotonic()))
        for reader in self._readers:
            reader.join(max(0.0, deadline - time.monotonic()))

    def _start(self, place: RankPlace, environment: Mapping[str, str]) -> None:
        rank = place.rank
        popen = subprocess.Popen(
            self._program,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=system.die_with_parent(),
        )
        self._ranks[rank] = popen
        threading.Thread(target=self._await_end, args=(rank, popen), daemon=True).start()
        stream = cast(io.BufferedReader, popen.stdout)
        reader = threading.Thread(target=_pass_on, args=(rank, stream), daemon=True)
        reader.start()
        self._readers.append(reader)

    def _await_end(self, rank: int, popen: subprocess.Popen[bytes]) -> None:
        code = popen.wait()
        killed = system.count_oom_kills() - self._oom_kills
        self._on_end(RankExit.read(rank, code, folder=self._folder, oom_kills=killed))


def _defaults(ranks: int, address: str) -> dict[str, str]:
    """Return default environment variables for ranks; existing ones take precedence.

    Gloo would otherwise resolve the host name, perhaps to an unreachable interface, and numeric
    libraries would use all cores in every rank.
    """
    names = INTERFACES[:1] if is_loopback(address) else INTERFACES
    interface = interface_of(address)
    found = dict.fromkeys(names, interface) if interface else {}
    return found | dict.fromkeys(THREADS, str(max(1, len(system.usable_cpus()) // ranks)))


def _pass_on(rank: int, stream: io.BufferedReader) -> None:
    """Copy the output of a rank, line by line, with the mark `[rank N]` for ranks above 0."""
    mark = b"[rank %d] " % rank if rank else b""
    with stream:
        for line in read_lines(stream):
            sys.stdout.buffer.write(mark + line + b"\n")
            sys.stdout.buffer.flush()
