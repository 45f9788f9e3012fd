"""Commands and containers: their node reports how they fare, and no member waits for rounds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.hub.server import HubServer
from atoll.wire.messages import Done, Drain, Offer, Offering, ProcessState, Stop
from atoll.wire.states import ProcessPhase
from tests.hub.membership import commands, events_of, job_of, launches, options, until
from tests.hub.peer import NODE, Peer, node

COMMAND = '[job]\nname = "c"\nnodes = {nodes}\ncommand = ["bash", "train.sh"]\n'


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer(options(tmp_path)) as server:
        yield server


def submit(hub: HubServer, *, nodes: int = 1) -> str:
    assert hub.hub is not None
    job = hub.call(hub.hub.stores.jobs.create(COMMAND.format(nodes=nodes), files={})).job
    hub.call(hub.hub.live.submit(job))
    return job


def tell(agent: Peer, job: str, state: str, *, member: str = "w0", code: int | None = None) -> None:
    body = ProcessState(job, member, ProcessPhase(state), exit_code=code, attempt=1)
    answer = agent.request(body)
    assert isinstance(answer, Done), answer


def test_command_is_done_with_exit_status_0(hub: HubServer) -> None:
    with node(hub, "a") as agent:
        job = submit(hub, nodes=2)
        assert set(launches(agent, 2)) == {"w0", "w1"}  # and no reducer
        tell(agent, job, "starting")
        tell(agent, job, "starting", member="w1")
        assert {m.state for m in job_of(hub, job).members.values()} == {"running"}
        tell(agent, job, "exited", code=0)
        assert job_of(hub, job).state == "running"  # the other one works on
        tell(agent, job, "exited", member="w1", code=0)
        until(lambda: job_of(hub, job).state == "done")
    assert not [event for event in events_of(hub, job) if event["kind"] == "paused"]


def test_command_lives_on_while_its_node_is_away(hub: HubServer) -> None:
    agent = node(hub, "a")
    with node(hub, "b"):
        job = submit(hub)
        where = job_of(hub, job).members["w0"].node
        assert where == "a"
        launches(agent, 1)
        tell(agent, job, "starting")
        agent.cut()
        until(lambda: job_of(hub, job).members["w0"].state == "lost")
        with back(hub, agent) as again:
            until(lambda: job_of(hub, job).members["w0"].state == "running")
            assert job_of(hub, job).members["w0"].attempt == 1
            tell(again, job, "exited", code=0)
            until(lambda: job_of(hub, job).state == "done")


def back(hub: HubServer, agent: Peer, *, incarnation: str = "i1") -> Peer:
    """Connect a node again, by the operator's token."""
    return Peer(hub, agent.session, incarnation=incarnation, info=NODE)


def test_command_is_relaunched_after_an_agent_restart(hub: HubServer) -> None:
    with node(hub, "a") as agent:
        job = submit(hub)
        launches(agent, 1)
        tell(agent, job, "starting")
        with back(hub, agent, incarnation="i2") as again:
            assert launches(again, 1)["w0"].attempt == 2


def test_command_is_asked_to_end_then_killed(hub: HubServer) -> None:
    assert hub.hub is not None
    with node(hub, "a") as agent:
        job = submit(hub)
        launches(agent, 1)
        tell(agent, job, "starting")
        hub.call(hub.hub.live.stop(job, grace_s=7.0))
        (stop,) = commands(agent, 1)
        assert isinstance(stop, Stop)
        assert (stop.member, stop.grace_s) == ("w0", 7.0)
        tell(agent, job, "exited", code=-15)
        until(lambda: job_of(hub, job).state == "stopped")


def test_offer_that_changes_is_kept_and_told(hub: HubServer) -> None:
    assert hub.hub is not None
    with node(hub, "a") as agent:
        offer = Offer(cores=2.0, paused="on battery")
        assert isinstance(agent.request(Offering(offer)), Done)
        assert hub.hub.membership.nodes["a"].info.offer == offer
        assert "a takes no work: on battery" in [e["text"] for e in events_of(hub, "")]
        assert isinstance(agent.request(Offering(Offer())), Done)
        assert "a takes work" in [e["text"] for e in events_of(hub, "")]


def test_draining_outlives_the_hub_but_not_the_agent(tmp_path: Path) -> None:
    with HubServer(options(tmp_path)) as hub, node(hub, "a") as agent:
        assert isinstance(agent.request(Drain(True, "new memory")), Done)
    with HubServer(options(tmp_path)) as hub, Peer(hub, "a", info=NODE) as agent:
        assert hub.hub is not None
        until(lambda: "a" in hub.hub.membership.nodes)  # type: ignore[union-attr]
        found = hub.hub.membership.nodes["a"]
        assert (found.draining, found.drain_reason) == (True, "new memory")
        job = submit(hub)
        assert job_of(hub, job).state == "waiting"
        with back(hub, agent, incarnation="i2"):
            until(lambda: job_of(hub, job).state == "running")


def test_running_job_without_nodes_says_why(hub: HubServer) -> None:
    with node(hub, "a") as agent:
        job = submit(hub)
        launches(agent, 1)
        tell(agent, job, "starting")
        assert isinstance(agent.request(Offering(Offer(paused="on battery"))), Done)
        tell(agent, job, "exited", code=75)
        until(lambda: job_of(hub, job).reason.endswith("0 are free (a: on battery)"))
        assert job_of(hub, job).state == "running"
        assert isinstance(agent.request(Offering(Offer())), Done)
        again = launches(agent, 1)["w0"]
        assert again.attempt == 2
        assert job_of(hub, job).reason == ""
        assert job_of(hub, job).members["w0"].retried == 0
