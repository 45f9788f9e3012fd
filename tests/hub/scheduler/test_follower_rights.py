"""What a follower may do at the hub, and the node that it runs on: no more than for itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.errors import AuthError
from atoll.hub.server import HubServer
from atoll.net.http.client import HubClient
from atoll.wire.messages import Failure, LogLines, ProcessState, Register, RendezvousAddress
from atoll.wire.states import ProcessPhase
from tests.hub.cluster import Cluster, follower_of, spec
from tests.hub.membership import options
from tests.hub.peer import member


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer(options(tmp_path)) as server:
        yield server


@pytest.fixture
def client(hub: HubServer) -> Iterator[HubClient]:
    with HubClient(hub.url, hub.operator_token) as made:
        yield made


@pytest.fixture
def four(hub: HubServer) -> Iterator[Cluster]:
    cluster = Cluster(hub, "a", "b", "c", "d")
    yield cluster
    cluster.close()


def test_a_new_launch_of_a_member_drops_its_rendezvous(hub: HubServer, client: HubClient) -> None:
    cluster = Cluster(hub, "a", "b")
    job = client.submit(spec(islands=1))
    leader, follower = cluster.launch("a"), cluster.launch("b")
    with HubClient(hub.url, leader.token) as old, HubClient(hub.url, follower.token) as asking:
        old.publish_rendezvous(job, "w0", RendezvousAddress("10.0.0.7:1", "secret"))
        cluster.tell("a", leader, "exited", exit_code=1, error={"kind": "RankLost", "what": "x"})
        again = cluster.launch("a")
        assert (again.member, again.attempt) == ("w0", 2)
        assert asking.find_rendezvous(job, "w0") is None
        with pytest.raises(AuthError):
            old.publish_rendezvous(job, "w0", RendezvousAddress("10.0.0.7:1", "secret"))
        assert asking.find_rendezvous(job, "w0") is None
    assert follower_of(hub, job, "w0.1").attempt == 1, "it waits for the new rendezvous"
    cluster.close()


def test_lines_of_a_follower_come_from_its_own_node_only(
    hub: HubServer, client: HubClient, four: Cluster
) -> None:
    job = client.submit(spec(islands=1))
    launched = {name: four.launch(name) for name in "ab"}
    answer = four.agents["b"].request(LogLines(job, "w0.1", 1, ["rank 1 is here"]))
    assert not isinstance(answer, Failure), answer
    refused = four.agents["c"].request(LogLines(job, "w0.1", 2, ["who is this?"]))
    assert isinstance(refused, Failure)
    state = ProcessState(job, "w0.1", ProcessPhase.RUNNING, attempt=launched["b"].attempt)
    assert isinstance(four.agents["c"].request(state), Failure)
    lines = client.logs(job, member="w0.1")["lines"]
    assert [line["text"] for line in lines] == ["rank 1 is here"]


def test_a_follower_that_speaks_to_the_hub_is_no_member(
    hub: HubServer, client: HubClient, four: Cluster
) -> None:
    client.submit(spec(islands=1))
    four.launch("a")
    with member(hub, four.launch("b")) as follower:
        answer = follower.request(Register())
        assert isinstance(answer, Failure)
        assert answer.error["kind"] == "AuthError"


def test_a_banned_nodes_followers_lose_their_rights(
    hub: HubServer, client: HubClient, four: Cluster
) -> None:
    job = client.submit(spec(islands=1))
    follower = four.launch("b")
    client.revoke_node("b")
    with HubClient(hub.url, follower.token) as process, pytest.raises(AuthError):
        process.find_rendezvous(job, "w0")


def test_a_node_uploads_only_what_its_own_follower_left(hub: HubServer, client: HubClient) -> None:
    assert hub.hub is not None
    cluster = Cluster(hub, "a")
    secret = hub.ticket.rpartition("/")[2]
    name, token = hub.call(hub.hub.stores.auth.redeem(secret, name="b"))
    cluster.back(name)
    job = client.submit(spec(islands=1))
    assert cluster.launch("b").member == "w0.1"
    with HubClient(hub.url, token) as agent:
        agent.put_file(job, "artifacts/w0.1/profile.json", b"{}")
        with pytest.raises(AuthError, match="own processes"):
            agent.put_file(job, "artifacts/w0/profile.json", b"{}")
    assert client.read_file(job, "artifacts/w0.1/profile.json") == b"{}"
    cluster.close()
