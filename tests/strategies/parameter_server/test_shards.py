from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.strategies.parameter_server.client import Shards, assign


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
