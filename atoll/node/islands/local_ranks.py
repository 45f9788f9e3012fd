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
from atoll.island.morph_orders import MorphOrder, give_order
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

        Each rank stores its error in `folder`; `on_end` is called with every exit until `close`, on
        its own thread, with the rank that the process had last.
        """
        self._folder, self._program, self._on_end = folder, program, on_end
        self._ranks: dict[int, subprocess.Popen[bytes]] = {}
        self._changing = threading.Lock()
        """Held while processes change their ranks."""
        self._rest: list[subprocess.Popen[bytes]] = []
        """Processes that have no rank any more."""
        self._closed = self._released = False
        self._readers: list[threading.Thread] = []
        self._oom_kills = system.count_oom_kills()

    def start(
        self, places: Sequence[RankPlace], *, own_address: str, spec_file: Path,
        number: int = 0, ordered: bool = False, planned: bool = False, **more: str,
    ) -> None:  # fmt: skip
        """Run a rank in each of the places with the job file `spec_file`; raises JobError.

        `own_address` selects the network interface. Living processes are reused, for their own rank
        if it is among the places; surplus ones are killed or, in a `planned` start, end after the
        round. New ones get the variables `more`; with `ordered` a later start can reuse them.
        """
        defaults = _defaults(len(places), own_address)
        more |= {"ATOLL_SPEC": str(spec_file)}
        for rank in range(max(place.rank for place in places) + 1):
            with suppress(OSError):
                (self._folder / error_file(rank)).unlink(missing_ok=True)
                (self._folder / phase_file(rank)).unlink(missing_ok=True)
        with self._changing:
            staying, rest = self._stay([place.rank for place in places])
            self._ranks = dict(staying)
            self._rest += rest
        for popen in rest:
            if planned:
                _let_end(popen)
            else:
                process_tree.signal_tree(process_tree.tree(popen.pid), number=system.KILL)
        for place in places:
            if place.rank in staying:
                given = cast(io.BufferedWriter, staying[place.rank].stdin)
                give_order(given, MorphOrder(number, place, str(spec_file), planned=planned))
                continue
            variables = {**config.rank_environment(place, defaults=defaults), **more}
            try:
                self._start(place.rank, variables, ordered=ordered)
            except OSError as error:
                raise JobError(
                    "a machine cannot start the ranks of an island",
                    given=f"rank {place.rank} of {place.ranks} ({error})",
                    remedy="look at the memory and the limits of that machine, or take fewer ranks",
                ) from error

    def lives(self, rank: int) -> bool:
        """Return whether the process of a rank has not ended."""
        return rank in self._ranks and self._ranks[rank].poll() is None

    def release(self) -> None:
        """Let the ranks end with their island: they get no more orders."""
        self._released = True
        for popen in self._ranks.values():
            _let_end(popen)

    def _stay(
        self, ranks: Sequence[int]
    ) -> tuple[dict[int, subprocess.Popen[bytes]], list[subprocess.Popen[bytes]]]:
        """Return the living processes for new ranks, and those that are too many."""
        living = {rank: popen for rank, popen in self._ranks.items() if popen.poll() is None}
        if self._released:
            self._released = False
            return {}, list(living.values())
        found = {rank: living.pop(rank) for rank in ranks if rank in living}
        for rank in ranks:
            if rank not in found and living:
                found[rank] = living.pop(min(living))
        return found, list(living.values())

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
        self._closed = True
        processes = [*self._ranks.values(), *self._rest]
        families = [one for popen in processes for one in process_tree.tree(popen.pid)]
        process_tree.signal_tree([*families, *process_tree.group_mates()], number=system.KILL)
        deadline = time.monotonic() + GONE_S
        for popen in processes:
            with suppress(subprocess.TimeoutExpired):
                popen.wait(timeout=max(0.0, deadline - time.monotonic()))
        for reader in self._readers:
            reader.join(max(0.0, deadline - time.monotonic()))

    def _start(self, rank: int, environment: Mapping[str, str], *, ordered: bool) -> None:
        popen = subprocess.Popen(
            self._program,
            env=environment,
            stdin=subprocess.PIPE if ordered else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=system.die_with_parent(),
        )
        with self._changing:
            self._ranks[rank] = popen
        threading.Thread(target=self._await_end, args=(popen,), daemon=True).start()
        reader = threading.Thread(target=self._pass_on, args=(popen,), daemon=True)
        reader.start()
        self._readers.append(reader)

    def _rank_of(self, popen: subprocess.Popen[bytes]) -> int | None:
        """Return the present rank of a process; None: it has none any more."""
        with self._changing:
            return next((rank for rank, one in self._ranks.items() if one is popen), None)

    def _await_end(self, popen: subprocess.Popen[bytes]) -> None:
        code = popen.wait()
        _let_end(popen)
        killed = system.count_oom_kills() - self._oom_kills
        rank = self._rank_of(popen)
        if rank is not None and not self._closed:
            self._on_end(RankExit.read(rank, code, folder=self._folder, oom_kills=killed))

    def _pass_on(self, popen: subprocess.Popen[bytes]) -> None:
        """Copy the output of a rank, line by line, with the mark `[rank N]` for ranks above 0."""
        with cast(io.BufferedReader, popen.stdout) as stream:
            for line in read_lines(stream):
                rank = self._rank_of(popen)
                mark = b"[rank %d] " % rank if rank else b""
                sys.stdout.buffer.write(mark + line + b"\n")
                sys.stdout.buffer.flush()


def _let_end(popen: subprocess.Popen[bytes]) -> None:
    """Close the input of a rank, so that it exits after its island's end without waiting."""
    if popen.stdin is not None:
        with suppress(OSError):
            popen.stdin.close()


def _defaults(ranks: int, address: str) -> dict[str, str]:
    """Return default environment variables for ranks; existing ones take precedence.

    Gloo would otherwise resolve the host name, perhaps to an unreachable interface, and numeric
    libraries would use all cores in every rank.
    """
    names = INTERFACES[:1] if is_loopback(address) else INTERFACES
    interface = interface_of(address)
    found = dict.fromkeys(names, interface) if interface else {}
    return found | dict.fromkeys(THREADS, str(max(1, len(system.usable_cpus()) // ranks)))
