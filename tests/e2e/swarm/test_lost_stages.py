"""Stages of real processes that lose all their members, or everything: nothing saved is lost."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from atoll.net.http.client import HubClient
from atoll.train.results.sample import load_model
from tests.e2e.conftest import Atoll, until, wait_for, while_working
from tests.e2e.swarm.test_runs import begin, check_end, job_of
from tests.patience import PATIENCE_S

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(os.name != "posix", reason="kill -9 is a signal of POSIX"),
]

SAVED = """
[checkpoint]
every = 20
"""


def text_of(atoll: Atoll, *, steps: int, nodes: int, stages: int = 2) -> str:
    text = job_of(atoll, steps=steps).replace("nodes = 4", f"nodes = {nodes}")
    return text.replace("stages = 2", f"stages = {stages}") + SAVED


def at_one_rate(text: str) -> str:
    """Return a job in which the number of steps does not change the rate of each."""
    return text.replace("warmup = 5", 'warmup = 5\nschedule = "constant"')


def peers_of(client: HubClient, job: str, stage: int) -> list[str]:
    view: Any = client.job(job)["swarm"]
    return [peer["member"] for peer in view["stages"][stage]["peers"]] if view else []


def told(client: HubClient, job: str, words: str) -> None:
    def look(view: dict[str, Any]) -> bool:
        return any(words in event["text"] for event in client.events(job)["events"])

    while_working(client, job, look)


def model_of(client: HubClient, job: str, folder: Path) -> Any:
    path = folder / "model.safetensors"
    client.get_file(job, "model.safetensors", path)
    return load_model(path)[0]


@pytest.mark.long(
    "tests/train/swarm/test_member.py::test_a_lost_stage_goes_on_from_a_checkpoint_with_all"
)
def test_a_stage_without_living_members_goes_on_from_a_save(atoll: Atoll) -> None:
    text = text_of(atoll, steps=300, nodes=2)
    known, job = begin(atoll, text, slots=2)
    with known.client() as client:
        told(client, job, "checkpoint of round 20 is complete")
        (member,) = until(lambda: peers_of(client, job, 1))
        atoll.worker(member).kill()
        told(client, job, "all stages go back to step")
        view = wait_for(client, job, "done", "failed")
        check_end(view, text, members=2)
        assert model_of(client, job, atoll.folder)


@pytest.mark.long("tests/train/swarm/test_build.py::test_files_of_stages_give_any_number_of_stages")
def test_a_stopped_swarm_goes_on_with_more_stages(atoll: Atoll) -> None:
    text = at_one_rate(text_of(atoll, steps=2_000, nodes=2))
    known, job = begin(atoll, text, slots=3)
    with known.client() as client:
        told(client, job, "checkpoint of round 20 is complete")
        client.stop(job, grace_s=PATIENCE_S)
        view = wait_for(client, job, "stopped", "failed")
        steps = max(member["result"]["steps"] for member in view["members"])
        told(client, job, f"checkpoint of round {steps} is complete")
        later = at_one_rate(text_of(atoll, steps=steps + 6, nodes=3, stages=3))
        assert client.resume(job, spec=later) == job
        view = wait_for(client, job, "done", "failed")
        check_end(view, later, members=3)
        assert model_of(client, job, atoll.folder)
