"""A rendezvous server of an island at a real hub, and machines that come to it."""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from atoll.config import (
    WorkerEnvironment,
)
from atoll.net.member_tls import MemberTls
from atoll.node.islands.rendezvous import NewsQueue
from atoll.node.islands.rendezvous_server import RendezvousServer
from atoll.node.islands.supervisor_link import (
    Ready,
    Start,
    SupervisorLink,
    greet,
)
from atoll.wire.messages import RendezvousAddress
from tests.node.islands.island_machines import RendezvousHub, rendezvous_hub
from tests.patience import PATIENCE_S


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[RendezvousHub]:
    with rendezvous_hub(tmp_path / "hub") as made:
        yield made


@dataclass
class Opened:
    """A rendezvous server, its events, and the hub where it is published."""

    server: RendezvousServer
    news: NewsQueue
    hub: RendezvousHub

    def dial(self) -> socket.socket:
        with self.hub.as_process("w1.1") as client:
            found = address_of(client.find_rendezvous, self.hub.job, "w1")
        host, _, port = found.dial.split()[0].rpartition(":")
        return socket.create_connection((host, int(port)), timeout=PATIENCE_S)

    def secret(self) -> str:
        with self.hub.as_process("w1.1") as client:
            return str(
                address_of(client.find_rendezvous, self.hub.job, "w1").secret.partition(".")[0]
            )

    def tls(self, name: str) -> MemberTls:
        return MemberTls(self.secret().encode(), name=name)

    def come(self, name: str = "w1.1") -> SupervisorLink:
        link = greet(self.dial(), tls=self.tls(name), leader="w1")
        link.send(Ready("far"))
        return link


def address_of(ask: Any, *arguments: str) -> RendezvousAddress:
    """Wait until the hub knows of a rendezvous server."""
    deadline = time.monotonic() + PATIENCE_S
    while (found := ask(*arguments)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert isinstance(found, RendezvousAddress)
    return found


def environment_of(hub: RendezvousHub, member: str, folder: Path) -> WorkerEnvironment:
    return WorkerEnvironment(
        hub=hub.url, token=hub.token(member), job=hub.job, member=member, directory=folder,
        spec=folder / "job.toml",
    )  # fmt: skip


@pytest.fixture
def opened(hub: RendezvousHub, tmp_path: Path) -> Iterator[Opened]:
    news: NewsQueue = queue.SimpleQueue()
    with RendezvousServer(
        environment_of(hub, "w1", tmp_path), machines=3, on_news=news.put
    ) as server:
        yield Opened(server, news, hub)


def start(count: int = 1) -> Start:
    return Start(
        number=0, mesh=(1, 2, 1, 1), first=1, count=count, machine=1, machines=2, address="h",
        port=1,
    )  # fmt: skip


def next_of(news: Any, kind: type) -> Any:
    found = news.get(timeout=PATIENCE_S)
    assert isinstance(found, kind), found
    return found
