"""A real hub in this process, a node in name only, and real members on threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from atoll.errors import AtollError
from atoll.group.group import Group, Work
from atoll.group.hub import HubGroup
from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from atoll.ids import session_id
from atoll.net.api import HubClient
from atoll.net.sync_link import SyncLink, connect
from atoll.net.ticket import parse_ticket
from atoll.reducer.server import Reducer
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

T = TypeVar("T")

SPEC = """
[job]
name = "meeting"
nodes = {nodes}
route = "{route}"
[train]
steps = 10
"""


def start_hub(folder: Path) -> HubServer:
    """Return a hub that takes a lost connection for a lost member almost at once."""
    return HubServer(
        HubOptions(
            data=folder / "data", jobs=folder / "jobs", reducers=False, reconnect_grace_s=0.3
        )
    )


class CappedGroup(HubGroup):
    """Shortens the time that plans allow, so that a test of the deadline takes no minutes."""

    cap_s = 60.0

    def join(
        self, round_: int, *, base: str, tokens: int = 0, deadline: float | None = None
    ) -> RoundPlan:
        plan = super().join(round_, base=base, tokens=tokens, deadline=deadline)
        self._plan = plan = msgspec.structs.replace(plan, timeout_s=min(plan.timeout_s, self.cap_s))
        return plan


class HubWorld:
    """One job with n members; on the relay route with a reducer on a thread."""

    counts_header_bytes = True

    def __init__(self, hub: HubServer, n: int, *, route: str, timeout_s: float = 60.0) -> None:
        self.hub, self.route = hub, route
        self.stop = threading.Event()
        self.links: dict[str, SyncLink] = {}
        info = NodeInfo(hostname="x", system="x", python="3", atoll="0", torch="2", slots=n)
        secret = parse_ticket(hub.ticket).secret
        with HubClient(hub.url) as client:
            self.node, token = client.join(secret, name="node", info=info)
        self.node_link = connect(hub.url, session=self.node, token=token, info=info)
        with HubClient(hub.url, hub.operator_token) as client:
            self.job = client.submit(SPEC.format(nodes=n, route=route))
        self.tokens: dict[str, str] = {}
        wanted = n + (n > 1 and route != "direct")
        while len(self.tokens) < wanted:
            self._take_commands()
        self.reducer_thread: Work[None] | None = None
        if "reducer" in self.tokens:
            self.start_reducer()
        self.groups = [self._member(f"w{slot}", timeout_s) for slot in range(n)]

    def _take_commands(self) -> None:
        queue = f"node/{self.node}"
        reply = self.node_link.request(
            QueueClaim(queue=queue, lease_s=60, limit=16, wait_s=1.0), timeout_s=20
        )
        assert isinstance(reply, QueueItems)
        for item in reply.items:
            command = unpack_command(item.payload)
            if isinstance(command, Launch) and command.job == self.job:
                self.tokens[command.member] = command.token
            self.node_link.request(QueueAck(queue=queue, lease=item.lease), timeout_s=10)

    def connect(self, member: str) -> SyncLink:
        link = connect(
            self.hub.url, session=session_id(self.job, member), token=self.tokens[member]
        )
        self.links[member] = link
        return link

    def start_reducer(self) -> None:
        reducer = Reducer(self.connect("reducer"), job=self.job)
        self.reducer_thread = Work.start(lambda: reducer.serve(stop=self.stop), name="reducer")

    def _member(self, member: str, timeout_s: float) -> HubGroup:
        group = CappedGroup(
            self.connect(member), job=self.job, member=member, hub=self.hub.url,
            route=self.route, patience_s=30.0,
        )  # fmt: skip
        group.cap_s = timeout_s
        group.register()
        return group

    def run(self, function: Callable[[Group], T]) -> list[T | BaseException]:
        """Call the function once per member; one that raises an error leaves the job."""

        def member(group: HubGroup) -> T:
            try:
                return function(group)
            except AtollError as error:
                self.links[group.me].close(Finished(ok=False, error=error.to_dict()))
                raise

        work = [Work.start(lambda g=g: member(g), name=g.me) for g in self.groups]  # type: ignore[misc]
        results: list[T | BaseException] = []
        for each in work:
            try:
                results.append(each.wait(60))
            except BaseException as error:
                results.append(error)
        return results

    def die(self, group: Group) -> None:
        """End a member's connections without a word."""
        self.links[group.me].close()
        group.close()

    def close(self) -> None:
        self.stop.set()
        for group in self.groups:
            group.close()
        for link in [*self.links.values(), self.node_link]:
            link.close()
