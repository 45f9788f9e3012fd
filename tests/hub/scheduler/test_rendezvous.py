"""Where islands await their further machines: who may say it, who may hear it, and how long."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.errors import AtollError, AuthError, ConfigError, HubError
from atoll.hub.server import HubServer
from atoll.net.http.client import HubClient
from atoll.wire.messages import RendezvousAddress
from tests.hub.membership import launches, options
from tests.hub.peer import node

SPEC = '[job]\nname = "g"\nnodes = 2\ncommand = ["true"]\n'
ADDRESS = RendezvousAddress("10.0.0.7:4711", "a-secret-of-this-island")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer(options(tmp_path)) as server:
        yield server


@pytest.fixture
def running(hub: HubServer) -> Iterator[str]:
    with node(hub, "box") as agent, HubClient(hub.url, hub.operator_token) as client:
        job = client.submit(SPEC)
        launches(agent, 2)
        yield job


def as_process(hub: HubServer, job: str, member: str) -> HubClient:
    """Return a client that has the token of a process of a job."""
    assert hub.hub is not None
    auth = hub.hub.stores.auth
    return HubClient(hub.url, hub.call(auth.issue_job_token(job, member=member, attempt=1)))


def test_followers_find_the_newest_address_of_their_member(hub: HubServer, running: str) -> None:
    with as_process(hub, running, "w1") as leader, as_process(hub, running, "w1.1") as follower:
        assert follower.find_rendezvous(running, "w1") is None
        leader.publish_rendezvous(running, "w1", RendezvousAddress("10.0.0.7:1", "older"))
        leader.publish_rendezvous(running, "w1", ADDRESS)
        assert (
            follower.find_rendezvous(running, "w1")
            == leader.find_rendezvous(running, "w1")
            == ADDRESS
        )


def test_only_processes_of_the_island_see_its_address(hub: HubServer, running: str) -> None:
    with as_process(hub, running, "w1") as leader:
        leader.publish_rendezvous(running, "w1", ADDRESS)
    with as_process(hub, running, "w1.1") as follower, pytest.raises(AuthError):
        follower.publish_rendezvous(running, "w1", ADDRESS)
    for other in ("w0", "w0.1", "reducer", ""):
        with as_process(hub, running, other) as process:
            with pytest.raises(AuthError):
                process.find_rendezvous(running, "w1")
            with pytest.raises(AuthError):
                process.publish_rendezvous(running, "w1", ADDRESS)
    with HubClient(hub.url, hub.operator_token) as person:
        with pytest.raises(AuthError):
            person.find_rendezvous(running, "w1")
        assert ADDRESS.secret not in str(person.job(running)) + str(person.events(running))


@pytest.mark.parametrize(
    "address",
    [RendezvousAddress("", "s"), RendezvousAddress("h:1", ""), RendezvousAddress("h" * 300, "s")],
)
def test_a_malformed_address_is_refused(
    hub: HubServer, running: str, address: RendezvousAddress
) -> None:
    with (
        as_process(hub, running, "w0") as leader,
        pytest.raises(ConfigError, match="not a rendezvous"),
    ):
        leader.publish_rendezvous(running, "w0", address)


def test_a_job_that_does_not_run_has_no_rendezvous(hub: HubServer) -> None:
    with HubClient(hub.url, hub.operator_token) as client:
        job = client.submit(SPEC)
    with as_process(hub, job, "w0") as leader, pytest.raises(HubError, match="is not running"):
        leader.publish_rendezvous(job, "w0", ADDRESS)
    with as_process(hub, job, "w0") as leader, pytest.raises(AtollError):
        leader.find_rendezvous("no-such-job", "w0")
