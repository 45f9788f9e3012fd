"""Agents of one place each, and jobs whose islands are spread over them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import msgspec

from atoll.hub.jobs.jobs import Member
from atoll.hub.server import HubServer
from atoll.wire.messages import Done, Launch, ProcessState, Stop
from atoll.wire.states import ProcessPhase
from tests.hub.membership import commands, job_of
from tests.hub.peer import NODE, Peer, node

SPEC = """
[job]
name = "wide"
nodes = {islands}
min_nodes = {least}
route = "direct"
[strategy]
inner = "fsdp"
[island]
ranks = 2
machines = 2
encryption = "off"
on_loss = "{on_loss}"
"""


class Cluster:
    """Agents of one place each, by name, and what they were to launch."""

    def __init__(self, hub: HubServer, *names: str) -> None:
        self._hub = hub
        self._open = ExitStack()
        self.agents: dict[str, Peer] = {}
        for name in names:
            self.join(name)

    def join(self, name: str) -> None:
        self.agents[name] = self._open.enter_context(node(self._hub, name, slots=1))

    def back(self, name: str, *, incarnation: str = "i1") -> None:
        """Connect the agent of a known node, the same or a new one."""
        info = msgspec.structs.replace(NODE, slots=1)
        agent = Peer(self._hub, name, incarnation=incarnation, info=info)
        self.agents[name] = self._open.enter_context(agent)

    def launch(self, name: str) -> Launch:
        """Take the only command that a node has got."""
        (found,) = commands(self.agents[name], 1)
        assert isinstance(found, Launch), found
        return found

    def stop(self, name: str) -> Stop:
        (found,) = commands(self.agents[name], 1)
        assert isinstance(found, Stop), found
        return found

    def tell(self, name: str, launch: Launch, state: str, **more: Any) -> None:
        """Tell how a process fares, as its node."""
        phase, attempt = ProcessPhase(state), launch.attempt
        body = ProcessState(launch.job, launch.member, phase, attempt=attempt, **more)
        answer = self.agents[name].request(body)
        assert isinstance(answer, Done), answer

    def close(self) -> None:
        self._open.close()


def spec(*, islands: int = 2, least: int = 0, on_loss: str = "wait") -> str:
    return SPEC.format(islands=islands, least=least, on_loss=on_loss)


def follower_of(hub: HubServer, job: str, name: str) -> Member:
    return job_of(hub, job).followers[name]
