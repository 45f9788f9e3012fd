"""The life of an agent: join with a ticket, connect, serve until asked to leave."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from atoll.errors import AuthError
from atoll.ids import safe_name
from atoll.net.api import HubClient
from atoll.net.link import Link, open_link
from atoll.net.ticket import Ticket
from atoll.node import identity, probe
from atoll.node.agent import Agent
from atoll.node.identity import Identity
from atoll.wire.messages import NodeInfo

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 20.0


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


@dataclass(frozen=True, slots=True)
class Status:
    """What the agent is doing, for one line on a screen."""

    node: str
    connected: bool
    running: list[str]
    sent_bytes: int
    received_bytes: int


def run_node(
    options: NodeOptions,
    *,
    on_ready: Callable[[Identity], None] = lambda _: None,
    on_status: Callable[[Status], None] = lambda _: None,
) -> None:
    """Join the hub and serve it until SIGINT or SIGTERM.

    Raises:
        HubUnreachable: no hub answers.
        AuthError: the ticket is unknown or used up.
        VersionMismatch: the hub is of another version.
    """
    compute = probe.measure_compute() if options.measure else None
    info = probe.node_info(options.home, slots=options.slots, compute=compute)
    me = identity.load_identity(options.home, hub=options.ticket.url)
    known = me is not None
    while True:
        me = me or _join(options, info)
        try:
            asyncio.run(_serve(options, me, info=info, on_ready=on_ready, on_status=on_status))
        except AuthError:
            if not known:
                raise
            log.warning("the hub does not know this machine any more: joining again")
            me, known = None, False
        else:
            return


def _join(options: NodeOptions, info: NodeInfo) -> Identity:
    """Exchange the ticket for a node id and its token, and keep them."""
    name = safe_name(options.name or info.hostname)
    with HubClient(options.ticket.url) as client:
        node, token = client.join(options.ticket.secret, name=name, info=info)
    me = Identity(hub=options.ticket.url, node=node, token=token)
    identity.save_identity(options.home, me)
    return me


async def _serve(
    options: NodeOptions,
    me: Identity,
    *,
    info: NodeInfo,
    on_ready: Callable[[Identity], None],
    on_status: Callable[[Status], None],
) -> None:
    """Connect and serve until a signal comes or the hub turns this node away for good."""
    leaving = asyncio.Event()
    _on_signals(leaving.set)
    link = await open_link(
        me.hub,
        session=me.node,
        token=me.token,
        info=info,
        stats=probe.load_figures,
        timeout_s=CONNECT_TIMEOUT_S,
    )
    agent = Agent(link, node=me.node, home=options.home, hub=me.hub)
    on_ready(me)
    tasks = [
        asyncio.create_task(agent.serve()),
        asyncio.create_task(_watch(link)),
        asyncio.create_task(leaving.wait()),
        asyncio.create_task(_show(agent, link, me, on_status)),
    ]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await agent.leave()
        await link.close(timeout_s=1.0)
    for task in done:
        task.result()


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
                me.node, link.connected, agent.running, counters.sent_bytes, counters.received_bytes
            )
        )
        await asyncio.sleep(1.0)
