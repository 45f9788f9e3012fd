"""A job of two members and a reducer at a real hub: what tests ask of it, and wait for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from atoll.hub.app import HubOptions
from atoll.hub.jobs.jobs import Job
from atoll.hub.server import HubServer
from atoll.wire.messages import (
    Done,
    Launch,
    QueueAck,
    QueueClaim,
    QueueItems,
    Register,
    Registered,
    RoundJoin,
    RoundPlan,
    RoundVote,
    Stop,
    unpack_command,
)
from tests.hub.peer import WAIT_S, Peer, member, node, submit
from tests.patience import PATIENCE_S


def options(
    folder: Path,
    *,
    restart_grace_s: float = 60.0,
    kill_grace_s: float = 10.0,
    reconnect_grace_s: float = 0.3,
) -> HubOptions:
    """Return options for a hub that soon loses who is cut off, but nobody who is only silent."""
    return HubOptions(
        data=folder / "data",
        jobs=folder / "runs",
        reducers=False,
        reconnect_grace_s=reconnect_grace_s,
        dead_after_s=10 * PATIENCE_S,
        first_grace_s=20.0,
        restart_grace_s=restart_grace_s,
        kill_grace_s=kill_grace_s,
    )


def job_of(hub: HubServer, job: str) -> Job:
    assert hub.hub is not None
    return hub.hub.stores.jobs.get(job)


def events_of(hub: HubServer, job: str) -> list[dict[str, Any]]:
    assert hub.hub is not None
    return hub.call(hub.hub.stores.events.read(job))


def event_texts(hub: HubServer, job: str, kind: str) -> list[str]:
    """Return the texts of all events of a kind."""
    return [event["text"] for event in events_of(hub, job) if event["kind"] == kind]


def until(condition: Callable[[], bool], what: str = "") -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def await_returns(hub: HubServer) -> None:
    """From now on, who is cut off may come back however long that takes on a busy machine."""
    assert hub.hub is not None
    hub.hub.sessions._grace_s = PATIENCE_S


def commands(agent: Peer, count: int) -> list[Launch | Stop]:
    """Claim and acknowledge that many commands."""
    found: list[Launch | Stop] = []
    queue, deadline = f"node/{agent.session}", time.monotonic() + WAIT_S
    while len(found) < count:
        items = agent.request(QueueClaim(queue, lease_s=30, limit=count, wait_s=5))
        assert isinstance(items, QueueItems)
        assert items.items or time.monotonic() < deadline
        for item in items.items:
            found.append(unpack_command(item.payload))
            assert isinstance(agent.request(QueueAck(queue, item.lease)), Done)
    return found


def launches(agent: Peer, count: int) -> dict[str, Launch]:
    """Claim that many launches of one job, by member."""
    return {c.member: c for c in commands(agent, count) if isinstance(c, Launch)}


def registered(peer: Peer, dial: Sequence[str] = (), state: Sequence[str] = ()) -> Registered:
    answer = peer.request(Register(list(dial), list(state)))
    assert isinstance(answer, Registered), answer
    return answer


def refusals(group: Running) -> str:
    return "; ".join(event_texts(group.hub, group.job, "refused"))


class Running:
    """A job of two members that have registered, on one node, with a reducer."""

    def __init__(self, hub: HubServer, *, nodes: int = 2, least: int = 0, more: str = "") -> None:
        self.hub = hub
        self.agent = node(hub, "box", slots=nodes)
        self.job = submit(hub, nodes=nodes, least=least, more=more)
        launched = launches(self.agent, nodes + (nodes > 1))
        self.launches = [launched[f"w{slot}"] for slot in range(nodes)]
        self.members = [member(hub, launch) for launch in self.launches]
        for peer in self.members:
            registered(peer)
        if nodes > 1:
            self.reducer_launch = launched["reducer"]
            self.reducer = member(hub, self.reducer_launch)

    def plan(self, round_: int = 0) -> RoundPlan:
        ids = [peer.ask(RoundJoin(round_, "base")) for peer in self.members]
        plans = [peer.answer(id) for peer, id in zip(self.members, ids, strict=True)]
        assert isinstance(plans[0], RoundPlan), plans
        assert all(plan == plans[0] for plan in plans)
        return plans[0]

    def close(self) -> None:
        for peer in (*self.members, self.reducer, self.agent):
            peer.close()


def vote(plan: RoundPlan, *, ok: bool = True) -> RoundVote:
    return RoundVote(plan.round, plan.epoch, ok, "digest", plan.members, "" if ok else "no")
