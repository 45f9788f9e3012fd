"""A member in a process of its own that stops or dies at a moment of its choice."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

import atoll.group.collectives.collectives
import atoll.group.routes.hierarchical
import atoll.group.routes.relay
import atoll.group.routes.rendezvous_store
from atoll.codec.registry import make_codec
from atoll.group.hub import HubGroup
from atoll.group.period import PeriodReport
from atoll.ids import session_id
from atoll.net.handshake import make_hello
from atoll.net.sync_link import connect
from tests.contracts.group_suite import one_round

MOMENTS = ("joining", "connecting", "exchanging", "passing", "voting")
"""Before its join, before its address is known, with its values half way, between what a delegate
gets and what it hands down, and before its vote."""


@dataclass(frozen=True)
class Victim:
    """What such a member needs to know."""

    hub: str
    token: str
    job: str
    member: str
    route: str
    reaches: tuple[str, ...] | None
    moment: str
    signal: int
    size: int


_armed: list[bool] = []
"""Filled when the round begins in which this process is hit."""


class _Group(HubGroup):
    reaches: tuple[str, ...] | None = None

    def _look_around(self) -> list[str]:
        found = super()._look_around()
        return found if self.reaches is None else [m for m in found if m in self.reaches]


def be_a_member(victim: Victim, tell: Connection) -> None:
    """Be hit at the moment, and tell how it ended if that was not the end.

    Members connect in round 0; everything else is tried in round 1, when the grace for processes
    that are still starting is over.
    """
    torch.set_num_threads(1)
    link = connect(victim.hub, make_hello(session_id(victim.job, victim.member), victim.token))
    group = _Group(
        link, job=victim.job, member=victim.member, hub=victim.hub, route=victim.route,
        patience_s=30.0,
    )  # fmt: skip
    group.reaches = victim.reaches
    group.register()
    tell.send("ready")

    def hit() -> None:
        tell.send("hit")
        os.kill(os.getpid(), victim.signal)

    _arrange(victim, hit if victim.moment != "joining" else lambda: None)
    try:
        if victim.moment != "connecting":
            one_round(group, [torch.ones(victim.size)])
        tell.send("ready")
        _armed.append(True)
        if victim.moment == "joining":
            hit()
        group.join(PeriodReport(group.committed_round, "base"))
        reduced = group.reduce(
            [torch.ones(victim.size)], codec=make_codec("fp32"), weight=1.0
        ).wait()
        if victim.moment == "voting":
            hit()
        group.commit(reduced)
        tell.send("committed")
    except Exception as error:
        tell.send(type(error).__name__)
    tell.close()
    os._exit(0)


def _arrange(victim: Victim, hit: Any) -> None:
    """Let the process be hit inside of a reduce, once."""
    done: list[bool] = []

    def once() -> None:
        if _armed and not done:
            done.append(True)
            hit()

    if victim.moment == "connecting":
        swap = atoll.group.routes.rendezvous_store.RendezvousStore.swap

        def hit_before_swap(self: Any, own: Any, wanted: Any) -> list[bytes]:
            once()
            return swap(self, own, wanted)

        atoll.group.routes.rendezvous_store.RendezvousStore.swap = hit_before_swap  # type: ignore[method-assign]
    if victim.moment == "exchanging":
        run = atoll.group.collectives.collectives.BoundedProcessGroup.run

        def hit_before_run(self: Any, start: Any) -> None:
            once()
            run(self, start)

        atoll.group.collectives.collectives.BoundedProcessGroup.run = hit_before_run  # type: ignore[method-assign]
        sending = atoll.group.routes.relay.RelayExchange._sending

        def hit_while_sending(self: Any) -> bool:
            if self._sent_bytes > 300_000:
                once()
            return sending(self)

        atoll.group.routes.relay.RelayExchange._sending = hit_while_sending  # type: ignore[method-assign]
    if victim.moment == "passing":
        hand_down = atoll.group.routes.hierarchical._hand_down

        def hit_before_handing(*arguments: Any, **options: Any) -> Any:
            once()
            return hand_down(*arguments, **options)

        atoll.group.routes.hierarchical._hand_down = hit_before_handing


HIT = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
