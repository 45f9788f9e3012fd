"""Islands over several machines, as the hub sees them: a member and its followers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.clock import VirtualClock
from atoll.config import parse_spec
from atoll.errors import AuthError
from atoll.hub.jobs.completion import AWAY_S, MAX_FAILURES, RestartPolicy
from atoll.hub.jobs.jobs import Job, Member
from atoll.hub.scheduler import follower_hosts
from atoll.hub.scheduler.requests import may_live_unheard
from atoll.hub.server import HubServer
from atoll.net.http.client import HubClient
from atoll.wire.limits import EXIT_LEFT
from atoll.wire.messages import Done, Drain, Finished, Launch, RendezvousAddress, Stop
from atoll.wire.states import MemberState, ProcessPhase
from tests.hub.cluster import Cluster, follower_of, spec
from tests.hub.membership import (
    commands,
    event_texts,
    job_of,
    options,
    registered,
    until,
)
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


def test_islands_get_their_machines_followers_are_no_members(
    hub: HubServer, client: HubClient, four: Cluster
) -> None:
    job = client.submit(spec())
    launched = {name: four.launch(name) for name in "abcd"}
    assert [launched[name].member for name in "abcd"] == ["w0", "w0.1", "w1", "w1.1"]
    assert [launched[name].slot for name in "abcd"] == [0, 0, 1, 1]
    assert len({launch.token for launch in launched.values()}) == 4
    record = job_of(hub, job)
    assert sorted(record.members) == ["w0", "w1"]
    assert sorted(record.followers) == ["w0.1", "w1.1"]
    four.tell("b", launched["b"], "starting")
    four.tell("b", launched["b"], "running")
    assert follower_of(hub, job, "w0.1").state == "running"


def test_job_starts_with_as_many_islands_as_fit(hub: HubServer, client: HubClient) -> None:
    cluster = Cluster(hub, "a")
    job = client.submit(spec(least=1))
    until(lambda: "needs 2 nodes, 1 is free" in client.job(job)["reason"])
    cluster.join("b")
    launched = cluster.launch("a"), cluster.launch("b")
    assert [launch.member for launch in launched] == ["w0", "w0.1"]
    cluster.join("c")  # of no use alone
    until(lambda: len(client.nodes()) == 3)
    assert sorted(job_of(hub, job).processes, key=lambda p: p.member) == [
        job_of(hub, job).members["w0"], follower_of(hub, job, "w0.1"),
    ]  # fmt: skip
    cluster.join("d")
    assert (cluster.launch("c").member, cluster.launch("d").member) == ("w1", "w1.1")
    assert client.job(job)["places"] == ["a", "b", "c", "d"]
    cluster.close()


def test_failed_follower_is_launched_again_with_another_token(
    hub: HubServer, client: HubClient
) -> None:
    cluster = Cluster(hub, "a", "b")
    job = client.submit(spec(islands=1))
    first = cluster.launch("b")
    cluster.tell("b", first, "running")
    error = {"kind": "JobError", "what": "no way to the first machine"}
    cluster.tell("b", first, "exited", exit_code=1, error=error, tail=["no way"])
    again = cluster.launch("b")
    assert (again.member, again.attempt) == ("w0.1", 2)
    assert again.token != first.token
    assert follower_of(hub, job, "w0.1").failures == 1
    assert job_of(hub, job).members["w0"].state == "assigned", "its member goes on waiting"
    cluster.tell("b", first, "exited", exit_code=1)  # of a process that was replaced
    assert follower_of(hub, job, "w0.1").state == "assigned"
    cluster.close()


def test_follower_whose_node_goes_away_is_launched_on_another(
    hub: HubServer, client: HubClient
) -> None:
    cluster = Cluster(hub, "a", "b")
    job = client.submit(spec(islands=1))
    cluster.tell("b", cluster.launch("b"), "running")
    cluster.join("spare")
    cluster.agents["b"].close()
    again = cluster.launch("spare")
    assert (again.member, again.attempt) == ("w0.1", 2)
    assert event_texts(hub, job, "member-lost") == ["b is lost: it disconnected"]
    # Should the first one live on unheard, it is ended when its node comes back.
    cluster.back("b")
    stop = cluster.stop("b")
    assert (stop.member, stop.attempt) == ("w0.1", 1)
    cluster.close()


def test_follower_of_a_leaving_node_moves(hub: HubServer, client: HubClient) -> None:
    cluster = Cluster(hub, "a", "b")
    job = client.submit(spec(islands=1))
    first = cluster.launch("b")
    cluster.tell("b", first, "running")
    cluster.join("spare")
    assert isinstance(cluster.agents["b"].request(Drain(draining=True, reason="night")), Done)
    cluster.tell("b", first, "exited", exit_code=EXIT_LEFT)
    assert cluster.launch("spare").attempt == 2
    assert follower_of(hub, job, "w0.1").failures == 0
    assert event_texts(hub, job, "member-left") == ["b has left"]
    cluster.close()


def test_only_a_restarted_agents_followers_are_lost(
    hub: HubServer, client: HubClient, four: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = client.submit(spec())
    for name in "abcd":
        launch = four.launch(name)
        four.tell(name, launch, "running" if "." in launch.member else "starting")
    four.agents["b"].close()
    until(lambda: follower_of(hub, job, "w0.1").state == "lost")
    four.back("b", incarnation="i2")
    again = four.launch("b")
    assert (again.member, again.attempt) == ("w0.1", 2)
    assert hub.hub is not None
    members = hub.hub.stores.jobs.members
    hub.call(members.launched(job, "w1", ProcessPhase.RUNNING))  # its island works
    four.agents["d"].close()
    until(lambda: follower_of(hub, job, "w1.1").state == "lost")
    events, scheduler = hub.hub.stores.events, hub.hub.scheduler
    add = events.add

    async def add_after_placement(job: str, kind: str, text: str, **more: Any) -> None:
        if kind == "node-online":
            await scheduler.schedule()
        await add(job, kind, text, **more)

    monkeypatch.setattr(events, "add", add_after_placement)
    four.back("d")
    until(lambda: follower_of(hub, job, "w1.1").state == "running")
    assert follower_of(hub, job, "w1.1").attempt == 1
    until(lambda: event_texts(hub, job, "member-back") == ["d is back"])


def test_fatal_follower_error_ends_the_job_with_its_node(hub: HubServer, client: HubClient) -> None:
    cluster = Cluster(hub, "a", "b")
    job = client.submit(spec(islands=1))
    error = {"kind": "ConfigError", "what": "the data is not there", "remedy": "bring it"}
    cluster.tell(
        "b", cluster.launch("b"), "exited", exit_code=1, error=error, tail=["a line of it"]
    )
    until(lambda: client.job(job)["state"] == "failed")
    view = client.job(job)
    assert view["reason"] == "a: w0.1 on b: the data is not there"
    assert (view["failed_member"], view["failed_node"]) == ("w0.1", "b")
    assert (view["error"]["kind"], view["error"]["remedy"]) == ("ConfigError", "bring it")
    assert (view["last_lines"], view["exit_code"]) == (["a line of it"], 1)
    launched, stopped = commands(cluster.agents["a"], 2)
    assert isinstance(launched, Launch)
    assert isinstance(stopped, Stop)
    cluster.close()


def test_island_with_a_failing_follower_is_given_up(
    hub: HubServer, client: HubClient, four: Cluster
) -> None:
    job = client.submit(spec(least=1))
    launched = {name: four.launch(name) for name in "abcd"}
    assert hub.hub is not None
    hub.call(hub.hub.stores.jobs.members.update(job, "w1.1", failures=MAX_FAILURES - 1))
    error = {"kind": "JobError", "what": "no way to the first machine", "given": "c"}
    four.tell("d", launched["d"], "exited", exit_code=1, error=error)
    assert four.stop("c").member == "w1"
    member_of = job_of(hub, job).members["w1"]
    assert member_of.state == "failed"
    assert member_of.error == error | {"what": "w1.1 on d: no way to the first machine"}
    assert (job_of(hub, job).state, job_of(hub, job).members["w0"].state) == ("running", "assigned")
    hub.call(hub.hub.stores.jobs.members.update(job, "w0.1", failures=MAX_FAILURES - 1))
    four.tell("b", launched["b"], "exited", exit_code=-9)
    until(lambda: client.job(job)["state"] == "failed")
    assert client.job(job)["reason"] == "every member was lost"
    assert client.resume(job) == job
    until(lambda: client.job(job)["state"] == "running")
    assert [h.failures for h in job_of(hub, job).followers.values()] == [0, 0]


def test_followers_end_with_their_job_and_rendezvous(hub: HubServer, client: HubClient) -> None:
    cluster = Cluster(hub, "a", "b")
    job = client.submit(spec(islands=1))
    leader, follower = cluster.launch("a"), cluster.launch("b")
    cluster.tell("b", follower, "running")
    with HubClient(hub.url, leader.token) as process:
        process.publish_rendezvous(job, "w0", RendezvousAddress("10.0.0.7:1", "secret"))
    with member(hub, leader) as peer:
        registered(peer)
        client.stop(job, grace_s=30.0)
        assert follower_of(hub, job, "w0.1").state == "running", "its member has a round to finish"
        assert isinstance(peer.request(Finished(True, {})), Done)
    assert cluster.stop("b").member == "w0.1"
    assert client.job(job)["state"] == "stopped"
    assert hub.hub is not None
    assert hub.hub.scheduler.followers.rendezvous.get(job, "w0") is None
    with HubClient(hub.url, follower.token) as process, pytest.raises(AuthError):
        process.find_rendezvous(job, "w0")
    assert client.nodes()[1]["running"] == []
    cluster.close()


def test_followers_go_when_their_member_is_scaled_away(
    hub: HubServer, client: HubClient, four: Cluster
) -> None:
    job = client.submit(spec())
    launched = {name: four.launch(name) for name in "abcd"}
    with member(hub, launched["a"]) as kept, member(hub, launched["c"]) as sent:
        registered(kept)
        registered(sent)
        client.scale(job, least=1, most=1)
        assert four.stop("c").member == "w1"
        assert follower_of(hub, job, "w1.1").state == "assigned", "until its member has left"
        four.tell("c", launched["c"], "exited", exit_code=EXIT_LEFT)
        assert four.stop("d").member == "w1.1"
        four.tell("d", launched["d"], "exited", exit_code=EXIT_LEFT)
        until(lambda: not [n for n in client.nodes() if n["node"] in "cd" and n["running"]])
        assert client.job(job)["state"] == "running"


def test_followers_live_on_while_the_hub_is_restarted(tmp_path: Path) -> None:
    with HubServer(options(tmp_path)) as hub, HubClient(hub.url, hub.operator_token) as client:
        cluster = Cluster(hub, "a", "b")
        job = client.submit(spec(islands=1))
        cluster.launch("a")
        cluster.tell("b", cluster.launch("b"), "running")
        cluster.close()
    with HubServer(options(tmp_path)) as hub, HubClient(hub.url, hub.operator_token) as client:
        assert hub.hub is not None
        cluster = Cluster(hub)
        cluster.back("b")
        until(lambda: [n["node"] for n in client.nodes()] == ["b"])
        hub.call(hub.hub.membership.reckon())  # who is not back is lost now
        assert job_of(hub, job).members["w0"].state == "lost"
        follower = follower_of(hub, job, "w0.1")
        assert (follower.state, follower.attempt) == ("running", 1)
        cluster.close()


def test_views_tell_followers_apart_from_members(
    hub: HubServer, client: HubClient, four: Cluster
) -> None:
    job = client.submit(spec())
    four.tell("d", [four.launch(name) for name in "abcd"][-1], "running")
    view = client.job(job)
    assert [m["member"] for m in view["members"]] == ["w0", "w1"]
    told_of = [(h["member"], h["follower_of"], h["node"], h["state"]) for h in view["followers"]]
    assert told_of == [("w0.1", "w0", "b", "assigned"), ("w1.1", "w1", "d", "running")]
    assert (view["machines"], view["island"]) == (2, "shard=2 on 2 machines")
    assert view["places"] == ["a", "b", "c", "d"]
    running = {n["node"]: n["running"] for n in client.nodes()}
    assert running["d"] == [f"{job}/w1.1"]
    assert event_texts(hub, job, "submitted") == ["submitted for 4 nodes, 2 for each member"]


@pytest.mark.parametrize(("state", "believed"), [("running", True), ("starting", False)])
def test_silent_follower_counts_while_its_island_runs(state: str, *, believed: bool) -> None:
    follower = Member(member="w0.1", slot=0, node="b", state=MemberState.LOST)
    leader = Member(member="w0", slot=0, node="a", state=MemberState(state))
    island = parse_spec('[strategy]\ninner = "fsdp"\n[island]\nranks = 2\nmachines = 2')
    members, followers = {"w0": leader}, {"w0.1": follower}
    job = Job(job="j", created=0.0, spec=island, members=members, followers=followers)
    assert may_live_unheard(job, follower) is believed
    clock = VirtualClock()
    relaunches = RestartPolicy(clock=clock)
    due = relaunches.due("j", follower, node_is_there=False, may_return=False, silent=believed)
    assert due is not believed
    clock.advance(AWAY_S)
    assert relaunches.due("j", follower, node_is_there=False, may_return=False, silent=believed)


def test_island_gives_way_when_two_wait_for_a_machine_each(
    hub: HubServer, client: HubClient, four: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower_hosts, "GIVE_WAY_S", 0.5)
    job = client.submit(spec(least=1))
    launched = {name: four.launch(name) for name in "abcd"}
    for name in "bd":
        four.agents[name].close()
    assert four.stop("c").member == "w1"
    four.tell("c", launched["c"], "exited", exit_code=EXIT_LEFT)
    again = four.launch("c")
    assert (again.member, again.attempt) == ("w0.1", 2)
    until(lambda: len(event_texts(hub, job, "island-gives-way")) == 1)
    four.back("b", incarnation="i2")
    four.back("d", incarnation="i2")
    record = job_of(hub, job)
    until(lambda: record.members["w1"].attempt == record.followers["w1.1"].attempt == 2)
    assert {record.members["w1"].node, record.followers["w1.1"].node} == {"b", "d"}
    assert len(event_texts(hub, job, "island-gives-way")) == 1


def test_stall_reason_clears_when_the_machine_is_back(hub: HubServer, client: HubClient) -> None:
    cluster = Cluster(hub, "a", "b")
    job = client.submit(spec(islands=1))
    cluster.tell("b", cluster.launch("b"), "running")
    cluster.agents["b"].close()
    until(lambda: "running: needs 1 node, 0 are free" in client.job(job)["reason"])
    cluster.back("b")
    until(lambda: client.job(job)["reason"] == "")
    assert (follower_of(hub, job, "w0.1").state, follower_of(hub, job, "w0.1").attempt) == (
        "running",
        1,
    )
    cluster.close()
