from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.clock import RealClock
from atoll.codec.base import Packet
from atoll.errors import PeerLost
from atoll.group.base import Work
from atoll.group.in_process.servers import ServerRequest
from atoll.group.single import SingleGroup
from atoll.strategies.parameter_server.client import ParameterServerClient, Shards, assign
from atoll.strategies.parameter_server.sync_points import Shard
from atoll.wire.parameter_server_messages import Answer, Ask, Setup
from tests.patience import PATIENCE_S


@given(parameters=st.integers(0, 5_000), buffers=st.integers(0, 40), servers=st.integers(1, 5))
def test_every_element_lies_on_one_server(parameters: int, buffers: int, servers: int) -> None:
    shards = Shards(parameters, parameters + buffers, servers=servers)
    whole = torch.arange(float(parameters + buffers))
    back = torch.full_like(whole, -1.0)
    for number in range(servers):
        part = shards.take(whole, number)
        assert part.numel() == shards.sizes[number]
        assert (part < parameters).sum() == shards.parameters[number]
        shards.put(back, number, part)
    assert torch.equal(back, whole)
    assert sum(shards.sizes) == parameters + buffers


def test_parts_of_parameters_alone_leave_the_buffers_out() -> None:
    shards = Shards(1_000, 1_010, servers=3)
    parts = [shards.take(torch.arange(1_000.0), number) for number in range(3)]
    assert [part.numel() for part in parts] == shards.parameters
    assert shards.sizes[0] == shards.parameters[0] + 10


@pytest.mark.parametrize("servers", [2, 4, 8])
def test_servers_hold_about_equally_much(servers: int) -> None:
    sizes = Shards(10_000_000, 10_000_000, servers=servers).sizes
    assert max(sizes) < 1.5 * 10_000_000 / servers


@pytest.mark.parametrize("servers", [2, 4, 8])
def test_another_server_moves_only_what_it_gets(servers: int) -> None:
    before, after = assign(4_096, servers), assign(4_096, servers + 1)
    moved = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    assert {b for _, b in moved} == {servers}
    assert len(moved) < 1.6 * 4_096 / (servers + 1)


class HeldServers(SingleGroup):
    """Two servers: the first lacks the sync point, the second answers when it is released."""

    def __init__(self, first: str) -> None:
        super().__init__()
        self.first, self.asked, self.released = first, 0, threading.Event()

    def ask_server(
        self, ask: Ask, packet: Packet | None = None, *, server: int = 0
    ) -> Work[ServerRequest]:
        if server == 0:
            return Work.of(ServerRequest(Answer("unknown"), None))
        self.asked += 1
        return Work.start(self._answered, name="held-server")

    def _answered(self) -> ServerRequest:
        self.released.wait(PATIENCE_S)
        if self.asked == 1 and self.first == "lost":
            raise PeerLost("the server restarts")
        return ServerRequest(Answer("load" if self.asked == 1 else "unknown"), None)


@pytest.mark.parametrize("first", ["lost", "load"])
def test_an_attach_that_failed_asks_no_server_again(first: str) -> None:
    group = HeldServers(first)
    client = ParameterServerClient(group, Shards(64, 64, servers=2), RealClock())

    def loading(number: int) -> tuple[Shard, Setup, float]:
        return Shard(torch.zeros(32), {}, {}, 0), Setup(), 0.0

    assert client.attach(0, ["w0"], loading, patient=True) is None
    (thread,) = (each for each in threading.enumerate() if each.name == "attach-1")
    group.released.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert group.asked == 1
