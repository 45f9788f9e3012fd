"""What is put in place of clocks, threads, sockets and disks while a world is simulated.

A name that a module no longer has fails loudly here: the simulation has to follow the code.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import atoll.clock
import atoll.config
import atoll.group.announced
import atoll.group.base
import atoll.group.hub
import atoll.group.hub_requests
import atoll.group.reachable
import atoll.group.routes.direct
import atoll.group.routes.exchange_queue
import atoll.group.routes.relay
import atoll.group.routes.routes
import atoll.group.run_round
import atoll.hub.app
import atoll.hub.sessions.session
import atoll.reducer.all_to_all
import atoll.reducer.assembly
import atoll.reducer.early
import atoll.reducer.parameter_server_endpoint
import atoll.reducer.results
import atoll.reducer.server
import atoll.wire.chunks
from tests.faults.simulation.checkpoints import SimulatedCheckpoints
from tests.faults.simulation.direct import SimulatedDirect
from tests.faults.simulation.fibers import SimulatedFuture
from tests.faults.simulation.hub import SimulatedSession, no_send_queue
from tests.faults.simulation.processes import SimulatedReducers
from tests.faults.simulation.threads import Executor

if TYPE_CHECKING:
    from tests.faults.simulation.world import World

parse_spec = functools.cache(atoll.config.parse_spec)
"""The same job file thousands of times."""

PIECE_BYTES = 16
"""Payload of one relayed chunk: a contribution is several."""


def table(world: World) -> list[tuple[Any, str, Any]]:
    """Return module, name and stand-in."""
    fibers, threading = world.fibers, world.threading

    def reachable(dials: dict[str, list[str]], **more: Any) -> list[str]:
        me = fibers.me().process
        return [
            member
            for member, entries in dials.items()
            if any(entry in world.stores and not me.line.dark for entry in entries)  # type: ignore[attr-defined]
        ]

    return [
        (atoll.clock, "time", world.scheduler),
        (atoll.group.run_round, "threading", threading),
        (atoll.group.base, "threading", threading),
        (atoll.group.base, "Future", lambda: SimulatedFuture(fibers)),
        (atoll.group.announced, "threading", threading),
        (atoll.group.reachable, "threading", threading),
        (atoll.group.hub, "threading", threading),
        (atoll.group.hub_requests, "threading", threading),
        (atoll.group.routes.exchange_queue, "threading", threading),
        (atoll.group.hub, "own_address", lambda url: "10.0.0.1"),
        (atoll.group.reachable, "probe_peers", reachable),
        (atoll.group.routes.routes, "DirectRoute", lambda **k: SimulatedDirect(world, **k)),
        (atoll.hub.app, "Checkpoints", SimulatedCheckpoints),
        (atoll.hub.app, "ReducerProcesses", SimulatedReducers),
        (atoll.hub.sessions.session, "Session", SimulatedSession),
        (atoll.hub.sessions.session, "SendQueue", no_send_queue),
        (atoll.reducer.server, "ThreadPoolExecutor", lambda **k: Executor(fibers)),
        (atoll.reducer.server, "threading", threading),
        (atoll.reducer.parameter_server_endpoint, "threading", threading),
        *((module, "parse_spec", parse_spec) for module in _readers_of_specs()),
        *(
            (module, "CHUNK_BYTES", PIECE_BYTES)
            for module in (
                atoll.wire.chunks, atoll.reducer.assembly, atoll.reducer.early,
                atoll.reducer.results, atoll.reducer.all_to_all, atoll.group.routes.relay,
            )
        ),
    ]  # fmt: skip


@functools.cache
def _readers_of_specs() -> tuple[Any, ...]:
    """Return the hub's modules that read job files."""
    hubs = [module for name, module in sys.modules.items() if name.startswith("atoll.hub.")]
    return tuple(module for module in hubs if hasattr(module, "parse_spec"))


@contextmanager
def installed(world: World) -> Iterator[None]:
    """Put all stand-ins in place, and everything back afterwards."""
    rows = table(world)
    before = [(module, name, getattr(module, name)) for module, name, _ in rows]
    for module, name, stand_in in rows:
        setattr(module, name, stand_in)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
