"""States of stages come from their members over a real hub, while these train."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.errors import GroupError
from atoll.recovery import Recipient, StateServer
from atoll.strategies.inner.swarm.runner import MicrobatchKey
from atoll.strategies.inner.swarm.stage import StageCut
from atoll.train.swarm.build import JobStages, TrainedStage
from atoll.train.swarm.states import JobStates
from tests.group.hub_world import NodeInName
from tests.recovery.world import LOCAL, World, members_on, node_of_a_hub
from tests.train.swarm.kit import COUNT, assert_same_state, job_of, place, step


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeInName]:
    with node_of_a_hub(tmp_path_factory.mktemp("hub")) as node:
        yield node


@pytest.fixture
def world(node: NodeInName) -> Iterator[World]:
    with members_on(node, nodes=3) as world:
        yield world


def newcomer(world: World) -> JobStates:
    link = world.link(world.me)
    recipient = Recipient(link, world.job, world.me, world.events.append)
    server = StateServer(job=world.job, token="", address=LOCAL, link=link)
    world.donors[world.me] = server

    def store() -> None:
        raise AssertionError("no checkpoint is needed")

    return JobStates(recipient, server, store, store)  # type: ignore[arg-type]


def donors(world: World, path: list[TrainedStage]) -> dict[str, list[str]]:
    """Two members of stage 1, of which only the first can be dialled."""
    for member in ("w0", "w1"):
        world.donor(member, direct=member == "w0", numel=1)
        world.donors[member].offer(path[1], still=path[1].task.state_lock.still)
    return {member: world.dials[member] for member in ("w0", "w1")}


@pytest.mark.parametrize("members", [["w0"], ["w1"], ["w0", "w1"]])
def test_a_stage_comes_from_members_that_go_on(
    world: World, tmp_path: Path, members: list[str]
) -> None:
    stages = JobStages(job_of(tmp_path), StageCut(stages=2), member="w0")
    path, rows = [stages.take(place(stage)) for stage in range(2)], stages.rows(COUNT)
    for number in range(2):
        step(path, rows, number)
    serves = donors(world, path)
    states = newcomer(world)
    later = JobStages(job_of(tmp_path), StageCut(stages=2), member=world.me, states=states)
    found: list[TrainedStage] = []
    fetching = threading.Thread(
        target=lambda: found.append(later.take(place(1, 2, donors=members, serves=serves)))
    )
    fetching.start()
    key = MicrobatchKey(2, 0)
    while fetching.is_alive():  # passes do not change the state
        inputs, targets = rows(2, 0)
        path[1].runner.loss(key, path[0].runner.forward(key, (inputs,)), targets)
        path[0].runner.drop(key)
        path[1].runner.drop(key)
    fetching.join()
    assert_same_state(found[0], path[1])
    step(path, rows, 2)
    with pytest.raises(GroupError, match="no member of this stage has the state"):
        later.take(place(1, 1, donors=members, serves=serves))
    assert_same_state(later.take(place(1, 3, donors=members, serves=serves)), path[1])
