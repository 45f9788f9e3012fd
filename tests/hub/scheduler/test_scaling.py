"""Bounds of a running job change while it runs: down, up again, beyond its data slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.errors import ConfigError
from atoll.hub.server import HubServer
from atoll.wire.messages import Finished, Launch, ProcessState, Registered, Stop
from atoll.wire.states import ProcessPhase
from tests.hub.membership import (
    Running,
    commands,
    event_texts,
    job_of,
    launches,
    options,
    registered,
    until,
    vote,
)
from tests.hub.peer import member, node, submit


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer(options(tmp_path)) as server:
        yield server


def scale(hub: HubServer, job: str, least: int, most: int) -> None:
    assert hub.hub is not None
    hub.call(hub.hub.live.scale(job, least=least, most=most))


def commit(group: Running, round_: int = 0) -> None:
    plan = group.plan(round_)
    ids = [peer.ask(vote(plan)) for peer in group.members]
    for peer, id in zip(group.members, ids, strict=True):
        peer.answer(id)


def test_job_shrinks_and_grows_again_while_its_rounds_go_on(hub: HubServer) -> None:
    group = Running(hub, nodes=3)
    commit(group)
    scale(hub, group.job, 1, 2)
    (stop,) = commands(group.agent, 1)
    assert isinstance(stop, Stop)
    assert stop.member == "w2"
    group.agent.request(ProcessState(group.job, "w2", ProcessPhase.EXITED, exit_code=75, attempt=1))
    group.members.pop().close()
    commit(group, 1)
    assert job_of(hub, group.job).committed_round == 2
    assert registered(group.members[0]).num_slots == 3  # the data keeps its slots
    scale(hub, group.job, 1, 3)
    (again,) = launches(group.agent, 1).values()
    assert (again.member, again.attempt) == ("w2", 2)
    with member(hub, again, incarnation="second") as peer:
        assert registered(peer).num_slots == 3
    assert job_of(hub, group.job).state == "running"
    assert event_texts(hub, group.job, "scaled") == [
        "1 to 2 members from now on", "1 to 3 members from now on",
    ]  # fmt: skip
    group.close()


def test_members_that_hold_the_state_stay_until_others_hold_it(hub: HubServer) -> None:
    group = Running(hub)
    commit(group)
    group.agent.request(ProcessState(group.job, "w0", ProcessPhase.EXITED, exit_code=-9, attempt=1))
    (again,) = launches(group.agent, 1).values()
    assert again.member == "w0"
    scale(hub, group.job, 0, 1)  # w1 is too many, but alone has the state
    with member(hub, again, incarnation="second") as peer:
        answer = registered(peer)
        assert answer.recover
        assert job_of(hub, group.job).members["w1"].state == "running"
    group.close()


def test_scaling_past_the_shards_restarts_from_checkpoint(
    tmp_path: Path,
) -> None:
    with HubServer(options(tmp_path)) as hub:
        group = Running(hub)
        with node(hub, "more", slots=2) as more:
            commit(group)
            scale(hub, group.job, 1, 4)
            record = job_of(hub, group.job)
            assert (record.stopping, record.rescaling) == (True, True)
            assert registered(group.members[0]).stopping
            for peer in group.members:
                peer.request(Finished(True))
                peer.close()
            until(lambda: set(record.members) == {"w0", "w1", "w2", "w3"})
            assert (record.state, record.stopping, record.rescaling) == ("running", False, False)
            by_node = {"box": group.agent, "more": more}
            assert Counter(m.node for m in record.members.values()) == {"box": 2, "more": 2}
            agent, started = by_node[record.members["w3"].node], dict[str, Launch]()
            while "w3" not in started:
                started |= launches(agent, 1)
            with member(hub, started["w3"]) as peer:
                answer: Registered = registered(peer)
                assert (answer.num_slots, answer.stopping) == (4, False)
            states = [e for e in ("stopped", "scaled") if event_texts(hub, group.job, e)]
            assert states == ["scaled"]
        group.close()


def test_bounds_outlive_the_hub(tmp_path: Path) -> None:
    with HubServer(options(tmp_path)) as hub:
        job = submit(hub, nodes=4)
        scale(hub, job, 1, 2)
    with HubServer(options(tmp_path)) as hub, node(hub, "a") as agent:
        until(lambda: job_of(hub, job).state == "running")
        assert len(launches(agent, 3)) == 3  # two members and a reducer
        assert job_of(hub, job).slots == 2


def test_bounds_that_cannot_be_and_jobs_that_ended_are_refused(hub: HubServer) -> None:
    assert hub.hub is not None
    job = submit(hub, nodes=1)
    for least, most in ((2, 1), (0, 0), (-1, 1), (0, 10**9)):
        with pytest.raises(ConfigError, match="cannot have so many"):
            scale(hub, job, least, most)
    hub.call(hub.hub.live.stop(job, grace_s=1))
    with pytest.raises(ConfigError, match="atoll resume"):
        scale(hub, job, 1, 2)


def test_latecomer_of_a_resumed_job_skips_its_checkpoint(hub: HubServer) -> None:
    assert hub.hub is not None
    group = Running(hub)
    hub.call(hub.hub.stores.jobs.update(group.job, resume_round=5))
    assert registered(group.members[0]).resume_round == 5
    commit(group)  # from now on newer checkpoints replace that one
    group.agent.request(ProcessState(group.job, "w1", ProcessPhase.EXITED, exit_code=-9, attempt=1))
    (again,) = launches(group.agent, 1).values()
    with member(hub, again, incarnation="second") as peer:
        answer = registered(peer)
        assert (answer.recover, answer.resume_round) == (True, -1)
    group.close()
