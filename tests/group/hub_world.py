"""A real hub in this process, a node in name only, and real members on threads."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from atoll.errors import AtollError
from atoll.group.base import Group, Work
from atoll.group.hub import HubGroup
from atoll.group.period import PeriodReport
from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from atoll.ids import session_id
from atoll.net.endpoint import parse_ticket
from atoll.net.handshake import make_hello
from atoll.net.http.client import HubClient
from atoll.net.sync_link import SyncLink, connect
from atoll.reducer.server import Reducer
from atoll.wire.limits import DEAD_AFTER_S
from atoll.wire.messages import (
    Finished,
    Launch,
    NodeInfo,
    QueueAck,
    QueueClaim,
    QueueItems,
    RoundPlan,
    unpack_command,
)
from tests.group.proxy import Proxy
from tests.patience import PATIENCE_S

T = TypeVar("T")

SPEC = """
[job]
name = "meeting"
nodes = {nodes}
route = "{route}"
[train]
steps = 10
"""


def start_hub(
    folder: Path, *, dead_after_s: float = DEAD_AFTER_S, reconnect_grace_s: float = 0.3
) -> HubServer:
    """Return a hub that takes a lost connection for a lost member: almost at once by default."""
    return HubServer(
        HubOptions(
            data=folder / "data", jobs=folder / "jobs", reducers=False,
            reconnect_grace_s=reconnect_grace_s, dead_after_s=dead_after_s,
        )
    )  # fmt: skip


class CappedGroup(HubGroup):
    """Shortens the time that plans allow, so that a test of the deadline takes no minutes."""

    cap_s = 60.0
    reaches: Collection[str] | None = None
    """Members that it can dial, as if the others were behind NAT; None: any that answers."""

    def _look_around(self) -> list[str]:
        found = super()._look_around()
        return found if self.reaches is None else [m for m in found if m in self.reaches]

    def join(self, report: PeriodReport, *, deadline: float | None = None) -> RoundPlan:
        plan = super().join(report, deadline=deadline)
        self._plan = plan = msgspec.structs.replace(plan, timeout_s=min(plan.timeout_s, self.cap_s))
        return plan


class NodeInName:
    """Takes commands as a node agent does, and starts nothing."""

    def __init__(self, hub: HubServer) -> None:
        self.hub = hub
        info = NodeInfo(hostname="x", system="x", python="3", atoll="0", torch="2", slots=5000)
        secret = parse_ticket(hub.ticket).secret
        with HubClient(hub.url) as client:
            self.name, token, _ = client.join(secret, name="node", info=info)
        self.link = connect(hub.url, make_hello(self.name, token, info=info))
        self.tokens: dict[str, dict[str, str]] = {}

    def submit(self, *, nodes: int, route: str) -> str:
        with HubClient(self.hub.url, self.hub.operator_token) as client:
            return client.submit(SPEC.format(nodes=nodes, route=route))

    def take_commands(self) -> None:
        """Note the tokens in the next launches."""
        queue = f"node/{self.name}"
        reply = self.link.request(
            QueueClaim(queue=queue, lease_s=60, limit=16, wait_s=1.0), timeout_s=PATIENCE_S
        )
        assert isinstance(reply, QueueItems)
        for item in reply.items:
            command = unpack_command(item.payload)
            if isinstance(command, Launch):
                self.tokens.setdefault(command.job, {})[command.member] = command.token
            self.link.request(QueueAck(queue=queue, lease=item.lease), timeout_s=PATIENCE_S)


class HubWorld:
    """One job with n members; on the relay route with a reducer on a thread."""

    counts_header_bytes = True

    def __init__(
        self,
        node: NodeInName,
        n: int,
        *,
        route: str,
        timeout_s: float = PATIENCE_S,
        proxied: Collection[str] = (),
        away_s: float = 60.0,
        sites: Sequence[Collection[str]] = (),
    ) -> None:
        self.hub, self.route = node.hub, route
        self.sites = sites
        self.away_s = away_s
        self.proxies = {member: Proxy(node.hub.port) for member in proxied}
        self.stop = threading.Event()
        self.links: dict[str, SyncLink] = {}
        self.job = node.submit(nodes=n, route=route)
        wanted = n + (n > 1 and route != "direct")
        while len(node.tokens.get(self.job, {})) < wanted:
            node.take_commands()
        self.tokens = node.tokens[self.job]
        self.reducer_thread: Work[None] | None = None
        if "reducer" in self.tokens:
            self.start_reducer()
        self.groups = [self._member(f"w{slot}", timeout_s) for slot in range(n)]

    def connect(self, member: str) -> SyncLink:
        url = self.proxies[member].url if member in self.proxies else self.hub.url
        link = connect(url, make_hello(session_id(self.job, member), self.tokens[member]))
        self.links[member] = link
        return link

    def start_reducer(self) -> None:
        reducer = Reducer(self.connect("reducer"), job=self.job, away_s=self.away_s)
        self.reducer_thread = Work.start(lambda: reducer.serve(stop=self.stop), name="reducer")

    def _member(self, member: str, timeout_s: float) -> HubGroup:
        group = CappedGroup(
            self.connect(member), job=self.job, member=member, hub=self.hub.url,
            route=self.route, patience_s=30.0,
        )  # fmt: skip
        group.cap_s = timeout_s
        if self.sites:
            group.reaches = next((site for site in self.sites if member in site), ())
        group.register()
        return group

    def run(self, function: Callable[[Group], T]) -> list[T | BaseException]:
        """Call the function once per member; one that raises an error leaves the job."""

        def member(group: HubGroup) -> T:
            try:
                return function(group)
            except AtollError as error:
                with contextlib.suppress(AtollError):  # its place may be taken at once
                    self.links.pop(group.me).close(Finished(ok=False, error=error.to_dict()))
                raise

        work = [Work.start(lambda g=g: member(g), name=g.me) for g in self.groups]  # type: ignore[misc]
        results: list[T | BaseException] = []
        deadline = time.monotonic() + PATIENCE_S
        for each in work:
            try:
                results.append(each.wait(max(0.0, deadline - time.monotonic())))
            except BaseException as error:
                results.append(error)
        return results

    def die(self, group: Group) -> None:
        """End a member's connections without a word."""
        self.links.pop(group.me).close()
        group.close()

    def close(self) -> None:
        self.stop.set()
        for group in self.groups:
            group.close()
        for link in list(self.links.values()):  # a member that fails late drops its own
            link.close()
        for proxy in self.proxies.values():
            proxy.close()
