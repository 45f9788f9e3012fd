"""One session of an agent with its hub: its concurrent tasks, and its end."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from atoll.clock import RealClock
from atoll.net.endpoint import HubEndpoint
from atoll.net.handshake import make_hello
from atoll.net.http.client import HubClient
from atoll.net.link import Link
from atoll.net.proxies import proxy_of
from atoll.net.sync_link import open_link
from atoll.node.agent.agent import Agent
from atoll.node.agent.options import NodeOptions, Status
from atoll.node.agent.reports import HeartbeatStats
from atoll.node.availability import preemption
from atoll.node.availability.policy import MBPS, OwnerPolicy
from atoll.node.availability.preemption import PreemptionNotices
from atoll.node.availability.rule import Pause
from atoll.node.availability.sensors import Metered, Sensors
from atoll.node.availability.watch import AvailabilityWatch
from atoll.node.identity.identity import Identity
from atoll.node.identity.join import keep_certificate
from atoll.node.launchers.launcher import Sandbox
from atoll.node.machine.bandwidth import Bandwidth, BandwidthWatch
from atoll.node.machine.probe import Gpus
from atoll.node.processes import process_tree
from atoll.node.processes.threads import run_abandonable
from atoll.wire.messages import NodeInfo

RETURN_TIMEOUT_S = 30 * 86_400.0
"""How long a machine that has joined before waits for its hub."""

CONNECT_TIMEOUT_S = 20.0

REAP_S = 1.0
"""Interval of reaping orphans, as process 1 of a container."""

PACE_FILE = "pace"
"""File in the home through which the processes of this node share a bandwidth limit."""


class AgentSession:
    """Connects and serves until a signal arrives or the hub rejects this node permanently."""

    def __init__(
        self,
        options: NodeOptions,
        me: Identity,
        *,
        info: NodeInfo,
        gpus: Gpus,
        on_ready: Callable[[Identity], None],
        on_status: Callable[[Status], None],
    ) -> None:
        me = dataclasses.replace(me, proxy=proxy_of(options.proxy, hub=me.hub, kept=me.proxy))
        # It holds a time of the monotonic clock, which is invalid after a reboot.
        (options.home / PACE_FILE).unlink(missing_ok=True)
        self._options = options
        self._me = me
        self._info = info
        self._on_ready = on_ready
        self._on_status = on_status
        self._figures = HeartbeatStats(options.home, gpus=gpus, root=options.machine)
        self._manners = AvailabilityWatch(
            options.policy_file(), senses=Sensors(root=options.machine)
        )

    async def run(self, *, known: bool) -> None:
        """Serve to the end.

        A machine that has joined before (`known`) waits for an unreachable hub: both may have been
        restarted.

        Raises:
            HubUnreachable: no hub answers.
            AuthError: the hub does not know this node.
            ConfigError: the owner's policy is invalid.
        """
        leaving, hurry = asyncio.Event(), asyncio.Event()
        _on_signals(lambda: hurry.set() if leaving.is_set() else leaving.set())
        policy, pause = await self._manners.look()
        endpoint = self._endpoint(policy)
        link = await self._connect(policy, pause, endpoint=endpoint, known=known, leaving=leaving)
        if link is None:
            return
        self._figures.counters = link.counters
        agent = Agent(
            link,
            self._me,
            home=self._options.home,
            endpoint=endpoint,
            slots=self._options.slots,
            gpus=self._info.gpus,
        )
        await self._offer(agent, policy, pause)
        self._on_ready(self._me)
        await _together(self._tasks(agent, link, leaving), agent, link, hurry)

    def _endpoint(self, policy: OwnerPolicy) -> HubEndpoint:
        """Return the endpoint of the hub, with the owner's bandwidth limits."""
        endpoint = self._me.endpoint
        if not policy.capped:
            return endpoint
        pace = self._options.home / PACE_FILE
        pace.touch(mode=0o600, exist_ok=True)
        return dataclasses.replace(
            endpoint,
            upload_bps=policy.upload_mbps * MBPS,
            download_bps=policy.download_mbps * MBPS,
            pace=str(pace),
        )

    async def _connect(
        self,
        policy: OwnerPolicy,
        pause: Pause,
        *,
        endpoint: HubEndpoint,
        known: bool,
        leaving: asyncio.Event,
    ) -> Link | None:
        """Return the open session; None: this machine was asked to leave before it opened."""
        info = msgspec.structs.replace(self._info, offer=policy.offer(paused=pause.text))
        connecting = asyncio.create_task(
            open_link(
                self._me.hub,
                make_hello(self._me.node, self._me.token, info=info),
                endpoint=endpoint,
                stats=self._figures,
                timeout_s=RETURN_TIMEOUT_S if known else CONNECT_TIMEOUT_S,
                patient=known,
            )
        )
        leave = asyncio.create_task(leaving.wait())
        await asyncio.wait([connecting, leave], return_when=asyncio.FIRST_COMPLETED)
        leave.cancel()
        if not connecting.done():
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
            return None
        return connecting.result()

    async def _offer(self, agent: Agent, policy: OwnerPolicy, pause: Pause) -> None:
        offer = policy.offer(paused=pause.text)
        if self._manners.error:
            said = f"the policy is invalid, the previous one stays in force: {self._manners.error}"
            offer = msgspec.structs.replace(offer, text=[*offer.text, said])
        await agent.set_offer(
            offer,
            endpoint=self._endpoint(policy),
            nice=policy.nice,
            trusted_keys=policy.trusted_keys,
            sandbox=(
                Sandbox(tuple(policy.readable), policy.network) if policy.sandbox == "on" else None
            ),
        )

    def _tasks(
        self, agent: Agent, link: Link, leaving: asyncio.Event
    ) -> list[Coroutine[Any, Any, Any]]:
        """Return the tasks that run until the first of them ends."""
        tasks: list[Coroutine[Any, Any, Any]] = [
            agent.serve(),
            _watch(link),
            leaving.wait(),
            self._show(agent, link),
            _heed(agent, self._options.notices),
            _bury(agent),
            keep_certificate(self._me),
            self._manners.follow(lambda policy, pause: self._offer(agent, policy, pause)),
        ]
        if self._options.measure:
            tasks.append(self._measure(agent))
        return tasks

    async def _measure(self, agent: Agent) -> None:
        me, metered = self._me, Metered()

        def keep(speed: Bandwidth) -> None:
            endpoint = agent.endpoint  # short trials exceed a limit by its burst
            self._figures.up_bps = min(speed.up_bps, endpoint.upload_bps or speed.up_bps)
            self._figures.down_bps = min(speed.down_bps, endpoint.download_bps or speed.down_bps)

        watch = BandwidthWatch(
            me.hub,
            open_client=lambda: HubClient(me.hub, me.token, endpoint=agent.endpoint),
            is_free=lambda: not agent.running,
            is_metered=lambda: metered.read().metered is True,
            on_speed=keep,
            clock=RealClock(),
        )
        await watch.run()

    async def _show(self, agent: Agent, link: Link) -> None:
        while True:
            status = Status(
                node=self._me.node,
                connected=link.connected,
                running=agent.running,
                sent_bytes=link.counters.sent_bytes,
                received_bytes=link.counters.received_bytes,
                draining=agent.draining,
                paused=agent.offer.paused,
                policy=tuple(agent.offer.text),
                computes_on=self._info.computes_on,
                idle=self._info.idle,
            )
            self._on_status(status)
            await asyncio.sleep(1.0)


async def _together(
    work: list[Coroutine[Any, Any, Any]], agent: Agent, link: Link, hurry: asyncio.Event
) -> None:
    """Run all tasks until the first ends, then leave in order and raise its error."""
    tasks = [asyncio.create_task(part) for part in work]
    hurrying = asyncio.create_task(_hurry(agent, hurry))
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await agent.leave()
        await link.close(timeout_s=1.0)  # after `leave`, which still reports over the link
        hurrying.cancel()
        await asyncio.gather(*tasks, hurrying, return_exceptions=True)
    for task in done:
        task.result()


async def _hurry(agent: Agent, hurry: asyncio.Event) -> None:
    await hurry.wait()
    agent.kill_all()


async def _heed(agent: Agent, notices: PreemptionNotices) -> None:
    """Drain the machine while a preemption notice exists."""
    if not notices:
        await asyncio.Event().wait()
    while True:
        reason = await run_abandonable(notices.read)
        if reason:
            await agent.drain(reason, source="notice")
        elif reason is not None:
            await agent.undrain(source="notice")
        await asyncio.sleep(preemption.POLL_S)


async def _bury(agent: Agent) -> None:
    """Reap orphans if this is process 1; otherwise the system does."""
    if os.getpid() != 1:
        await asyncio.Event().wait()
    while True:
        process_tree.reap(own=agent.children)
        await asyncio.sleep(REAP_S)


def _on_signals(leave: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        if sys.platform == "win32":  # event loops there do not support signal handlers
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(leave))
        else:
            loop.add_signal_handler(number, leave)


async def _watch(link: Link) -> None:
    raise await link.wait_failed()
