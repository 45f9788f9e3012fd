"""The life of an agent: join with a ticket, connect, serve until asked to leave."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from atoll.errors import AuthError
from atoll.net.link import Link
from atoll.net.opening import open_link
from atoll.net.ticket import Ticket
from atoll.node import identity, parent, preempt, probe
from atoll.node.agent import Agent
from atoll.node.identity import Identity
from atoll.node.joining import enter
from atoll.node.preempt import Notices
from atoll.wire.messages import NodeInfo

log = logging.getLogger(__name__)

RETURN_TIMEOUT_S = 30 * 86_400.0
"""How long a machine that has joined before waits for its hub to come back."""

CONNECT_TIMEOUT_S = 20.0

REAP_S = 1.0
"""Pause between two looks at orphans, as process 1 of a container."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """What the person at this machine decided."""

    ticket: Ticket
    home: Path
    """Folder of this agent: identity, jobs."""
    name: str = ""
    """Start of the node's id; empty: the machine's host name."""
    slots: int = 1
    """How many workers it takes at once."""
    measure: bool = True
    """Whether the matmul speed is measured before joining (seconds, once)."""
    notices: Notices = field(default_factory=Notices)
    """Where a notice would appear that this machine is about to be taken away."""


@dataclass(frozen=True, slots=True)
class Status:
    """What the agent is doing, for one line on a screen."""

    node: str
    connected: bool
    running: list[str]
    sent_bytes: int
    received_bytes: int
    draining: str = ""
    """Why it takes no work now."""


def run_node(
    options: NodeOptions,
    *,
    on_ready: Callable[[Identity], None] = lambda _: None,
    on_status: Callable[[Status], None] = lambda _: None,
) -> None:
    """Join the hub and serve it until SIGINT or SIGTERM; the second of them hurries.

    Raises:
        HubUnreachable: no hub answers.
        AuthError: the ticket is unknown or used up.
        VersionMismatch: the hub is of another version.
    """
    try:
        with _interruptible():
            compute = probe.measure_compute() if options.measure else None
            info = probe.node_info(options.home, slots=options.slots, compute=compute)
            me = identity.load_identity(options.home, hub=options.ticket.url)
            trusted = me is not None
            me = me or _enter(options, info)
        while True:
            served = _Served(on_ready)
            try:
                serving = _serve(
                    options, me, info=info, known=trusted, on_ready=served, on_status=on_status
                )
                asyncio.run(serving)
                return
            except AuthError:
                if not (trusted or served.once):
                    raise
                log.warning("the hub does not know this machine any more: joining again")
            with _interruptible():
                me, trusted = _enter(options, info), False
    except KeyboardInterrupt:
        return


class _Served:
    """Notes that the hub has taken this node in, then passes it on."""

    def __init__(self, on_ready: Callable[[Identity], None]) -> None:
        self.once = False
        self._on_ready = on_ready

    def __call__(self, me: Identity) -> None:
        self.once = True
        self._on_ready(me)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM end what runs inside as Ctrl+C does.

    Without a handler of its own process 1 of a container would not even hear the signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _enter(options: NodeOptions, info: NodeInfo) -> Identity:
    """Join with the ticket."""
    return enter(options.ticket, home=options.home, name=options.name, info=info)


async def _serve(
    options: NodeOptions,
    me: Identity,
    *,
    info: NodeInfo,
    known: bool,
    on_ready: Callable[[Identity], None],
    on_status: Callable[[Status], None],
) -> None:
    """Connect and serve until a signal comes or the hub turns this node away for good.

    A machine that has joined before waits for a hub that is away: both may have been restarted.
    """
    leaving, hurry = asyncio.Event(), asyncio.Event()
    _on_signals(lambda: hurry.set() if leaving.is_set() else leaving.set())
    connecting = asyncio.create_task(
        open_link(
            me.hub,
            session=me.node,
            token=me.token,
            way=me.way,
            info=info,
            stats=probe.load_figures,
            timeout_s=RETURN_TIMEOUT_S if known else CONNECT_TIMEOUT_S,
            patient=known,
        )
    )
    asked = asyncio.create_task(leaving.wait())
    await asyncio.wait([connecting, asked], return_when=asyncio.FIRST_COMPLETED)
    if not connecting.done():
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        return
    asked.cancel()
    link = connecting.result()
    agent = Agent(link, node=me.node, home=options.home, hub=me.hub, way=me.way)
    on_ready(me)
    tasks = [
        asyncio.create_task(agent.serve()),
        asyncio.create_task(_watch(link)),
        asyncio.create_task(leaving.wait()),
        asyncio.create_task(_show(agent, link, me, on_status)),
        asyncio.create_task(_heed(agent, options.notices)),
        asyncio.create_task(_bury(agent)),
    ]
    hurrying = asyncio.create_task(_hurry(agent, hurry))
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await agent.leave()
        await link.close(timeout_s=1.0)
        hurrying.cancel()
        await asyncio.gather(*tasks, hurrying, return_exceptions=True)
    for task in done:
        task.result()


async def _hurry(agent: Agent, hurry: asyncio.Event) -> None:
    """Kill what still runs when a second signal comes."""
    await hurry.wait()
    agent.kill_all()


async def _heed(agent: Agent, notices: Notices) -> None:
    """Drain the machine while a notice says that it will be taken away."""
    if not notices:
        await asyncio.Event().wait()
    while True:
        reason = await asyncio.to_thread(notices.read)
        if reason:
            await agent.drain(reason, source="notice")
        elif reason is not None:
            await agent.undrain(source="notice")
        await asyncio.sleep(preempt.POLL_S)


async def _bury(agent: Agent) -> None:
    """Bury orphans, if this is process 1; else the system does."""
    if os.getpid() != 1:
        await asyncio.Event().wait()
    while True:
        parent.reap(own=agent.children)
        await asyncio.sleep(REAP_S)


def _on_signals(leave: Callable[[], None]) -> None:
    """Call `leave` on the loop when this process is asked to end."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        if sys.platform == "win32":  # its loops have no signal handlers of their own
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(leave))
        else:
            loop.add_signal_handler(number, leave)


async def _watch(link: Link) -> None:
    """End with the error of a link that failed for good."""
    raise await link.wait_failed()


async def _show(
    agent: Agent, link: Link, me: Identity, on_status: Callable[[Status], None]
) -> None:
    """Tell once a second what the agent is doing."""
    while True:
        counters = link.counters
        on_status(
            Status(
                me.node,
                link.connected,
                agent.running,
                counters.sent_bytes,
                counters.received_bytes,
                agent.draining,
            )
        )
        await asyncio.sleep(1.0)
