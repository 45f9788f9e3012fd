"""Jobs whose strategy wants several parameter servers get as many reducers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from atoll.config import parse_spec
from atoll.errors import AuthError, StorageFull
from atoll.hub.jobs.record import Job
from atoll.hub.scheduler import reducer_hosts
from atoll.hub.scheduler.reducer_hosts import reducers_of
from atoll.ids import is_reducer, reducer_id, session_id
from atoll.net.handshake import make_hello
from atoll.net.http.client import HubClient
from atoll.net.sync_link import connect
from tests.group.hub_world import NodeInName, start_hub

SPEC = """
[job]
name = "served"
nodes = 2
route = "{route}"
[train]
steps = 10
[strategy]
preset = "parameter-server"
servers = 3
"""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeInName]:
    with start_hub(tmp_path) as hub:
        node = NodeInName(hub)
        yield node
        node.link.close()


def submit(node: NodeInName, route: str, *, processes: int) -> str:
    with HubClient(node.hub.url, node.hub.operator_token) as client:
        job = client.submit(SPEC.format(route=route))
    while len(node.tokens.get(job, {})) < processes:
        node.take_commands()
    return job


def test_every_server_is_launched_and_again_when_it_is_lost(node: NodeInName) -> None:
    job = submit(node, "auto", processes=5)
    names = [reducer_id(number) for number in range(3)]
    assert sorted(node.tokens[job]) == [*names, "w0", "w1"]
    links = {
        name: connect(node.hub.url, make_hello(session_id(job, name), node.tokens[job][name]))
        for name in names
    }
    token = node.tokens[job]["reducer-1"]
    links["reducer-1"].close()
    while node.tokens[job]["reducer-1"] == token:
        node.take_commands()
    for link in links.values():
        link.close()


def test_a_slow_machine_gets_longer_each_time(
    node: NodeInName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer process takes the place of one that still starts, so the pauses have to grow."""
    monkeypatch.setattr(reducer_hosts, "START_S", 0.5)
    job = submit(node, "auto", processes=5)
    tokens = {node.tokens[job]["reducer"]: time.monotonic()}
    link = None
    while link is None:
        node.take_commands()
        newest = node.tokens[job]["reducer"]
        began = tokens.setdefault(newest, time.monotonic())
        assert len(tokens) < 9, "no process has the time to start"
        # The seconds that a process needs; the first one was too slow.
        if len(tokens) > 1 and time.monotonic() > began + 1.5:
            with suppress(AuthError):  # a newer one was launched meanwhile
                link = connect(node.hub.url, make_hello(session_id(job, "reducer"), newest))
    link.close()


def test_members_that_dial_each_other_need_no_server(node: NodeInName) -> None:
    job = submit(node, "direct", processes=2)
    assert sorted(node.tokens[job]) == ["w0", "w1"]


def test_names_of_reducers_are_told_from_those_of_members() -> None:
    assert [reducer_id(), reducer_id(0), reducer_id(2)] == ["reducer", "reducer", "reducer-2"]
    assert is_reducer("reducer")
    assert is_reducer("reducer-2")
    assert not is_reducer("w0")


@pytest.mark.parametrize(
    ("preset", "nodes", "expected"),
    [("async-diloco", 1, 1), ("parameter-server", 1, 1), ("diloco", 1, 0), ("diloco", 2, 1)],
)
def test_lone_member_has_a_server_only_if_its_method_does(
    preset: str, nodes: int, expected: int
) -> None:
    text = f'[job]\nnodes = {nodes}\n[strategy]\npreset = "{preset}"\n'
    job = Job(job="one", created=0.0, spec=parse_spec(text))
    assert len(reducers_of(job)) == expected


def test_two_looks_at_once_launch_each_reducer_once(node: NodeInName) -> None:
    submit(node, "auto", processes=5)
    assert node.hub.hub is not None
    reducers, places = node.hub.hub.scheduler.reducers, []
    launch = reducers._launch

    async def counted(job: Job, reducer: str) -> bool:
        places.append(reducer)
        return await launch(job, reducer)

    async def looks() -> None:
        reducers._launch = counted  # type: ignore[method-assign]
        reducers._next.clear()
        await asyncio.gather(reducers.tick(), reducers.tick())

    node.hub.call(looks())
    assert sorted(places) == [reducer_id(number) for number in range(3)]


def test_a_reducer_that_nobody_can_launch_is_tried_again(node: NodeInName) -> None:
    submit(node, "auto", processes=5)
    assert node.hub.hub is not None
    reducers, tried = node.hub.hub.scheduler.reducers, []

    async def fail(job: Job, reducer: str) -> bool:
        tried.append(reducer)
        if len(tried) < 3:
            raise StorageFull("no space is left")
        return False

    async def looks() -> None:
        reducers._launch = fail  # type: ignore[method-assign]
        reducers._next.clear()
        await reducers.tick()
        await reducers.tick()

    node.hub.call(looks())
    assert sorted(tried) == sorted(2 * [reducer_id(number) for number in range(3)])
