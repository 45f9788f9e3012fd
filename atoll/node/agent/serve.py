"""The life of an agent: join with a ticket, connect, serve until asked to leave."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
import threading
from collections.abc import Callable, Iterator

from atoll.config import cache
from atoll.errors import AuthError, Revoked
from atoll.net.proxies import DIRECT, proxy_of
from atoll.node.agent.options import NodeOptions, Status
from atoll.node.agent.session import AgentSession
from atoll.node.identity import identity
from atoll.node.identity.identity import Identity
from atoll.node.identity.join import enter_cluster, known_hub
from atoll.node.launchers import available
from atoll.node.machine import probe
from atoll.node.machine.probe import Gpus
from atoll.wire.messages import NodeInfo

log = logging.getLogger(__name__)


def run_node(
    options: NodeOptions,
    *,
    on_ready: Callable[[Identity], None] = lambda _: None,
    on_status: Callable[[Status], None] = lambda _: None,
) -> None:
    """Join the hub and serve it until SIGINT or SIGTERM; a second signal kills processes.

    Raises:
        HubUnreachable: no hub answers.
        AuthError: the ticket is unknown or used up.
        Revoked: an operator has revoked this machine.
        VersionMismatch: the hub has another version.
        ConfigError: the owner's policy is invalid.
    """
    try:
        with _interruptible():
            policy = options.policy_file().read()  # report an invalid one before anything else
            gpus = Gpus()
            compute = None
            if options.measure:
                compute = probe.known_compute(cache(), gpus, device=policy.device)
            if not options.slots:
                options = dataclasses.replace(
                    options, slots=probe.default_slots(compute, policy.device)
                )
            info = probe.node_info(
                options.home,
                slots=options.slots,
                compute=compute,
                gpus=gpus,
                launchers=available(),
                wanted=policy.device,
            )
            me = known_hub(options.ticket, home=options.home)
            trusted = me is not None
            if me is not None and options.proxy:
                me = _keep_proxy(options, me)
            me = me or _enter(options, info)
        while True:
            served = _Served(on_ready)
            try:
                serving = AgentSession(
                    options, me, info=info, gpus=gpus, on_ready=served, on_status=on_status
                )
                asyncio.run(serving.run(known=trusted))
                return
            except Revoked:
                raise  # an operator revoked this machine: its old ticket must not admit it again
            except AuthError:
                if not (trusted or served.once):
                    raise
                log.warning("the hub does not know this machine any more: joining again")
            with _interruptible():
                me, trusted = _enter(options, info), False
    except KeyboardInterrupt:
        return


class _Served:
    """Records that the hub has accepted this node, then calls `on_ready`."""

    def __init__(self, on_ready: Callable[[Identity], None]) -> None:
        self.once = False
        self._on_ready = on_ready

    def __call__(self, me: Identity) -> None:
        self.once = True
        self._on_ready(me)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt inside.

    Process 1 of a container ignores signals without a handler.
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
    proxy = proxy_of(options.proxy, hub=options.ticket.url)
    me = enter_cluster(options.ticket, home=options.home, name=options.name, info=info, proxy=proxy)
    return _keep_proxy(options, me)


def _keep_proxy(options: NodeOptions, me: Identity) -> Identity:
    """Store an explicitly chosen proxy, but not one from the environment."""
    proxy = "" if options.proxy == DIRECT else options.proxy
    if me.proxy != proxy:
        me = dataclasses.replace(me, proxy=proxy)
        identity.save_identity(options.home, me)
    return me
