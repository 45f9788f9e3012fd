"""Members with the whole model beside a SWARM, as real processes."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import psutil
import pytest

from atoll.cli.hub_access import find
from bench.kit.ports import free_port
from tests.e2e.conftest import ENDLESS, Atoll, ticket_of, until, wait_for, while_working
from tests.e2e.swarm.test_lost_stages import SAVED, at_one_rate, told
from tests.e2e.swarm.test_runs import answers, begin, job_of, results_of, submit, wait_together
from tests.e2e.test_islands import ranks
from tests.patience import PATIENCE_S

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(os.name != "posix", reason="kill -9 is a signal of POSIX"),
]

DILOCO = 'preset = "diloco"\nevery = 4\nouter_lr = 0.8\ncodec = "fp32"'
RARE = DILOCO.replace("every = 4", "every = 40")
"""A member that takes over the state is back before the next round, on a busy machine, too."""


def saved(text: str) -> str:
    """Return a job that saves checkpoints, and learns at one rate however many steps it has."""
    return at_one_rate(text) + SAVED


def check_one_model(view: dict[str, Any], *, stages: int = 2) -> None:
    """The member with the whole model has the bits of all stages, after as many rounds."""
    results = results_of(view)
    one, *others = sorted(results, key=lambda result: result["stage"])
    assert [one["stage"], *(other["stage"] for other in others)] == [-1, *range(stages)]
    assert len({result["rounds"] for result in results}) == 1
    held = {name: value for other in others for name, value in other["tensors"].items()}
    assert one["tensors"] == held, "one model, bit for bit"


@pytest.mark.long(
    "tests/train/swarm/test_whole.py::test_it_waits_for_donors_and_takes_their_optimizers"
)
def test_a_member_with_the_whole_model_meets_both_stages(atoll: Atoll) -> None:
    """It is killed in between, and takes over from the stages what they agreed on."""
    text = job_of(atoll, steps=ENDLESS, nodes="3", strategy=RARE, whole=1)
    known, job = begin(atoll, text)
    with known.client() as client:
        until(lambda: int(client.job(job)["committed_round"]) >= 2)
        atoll.worker("w0").kill()
        wait_together(client, job, attempts=[1, 1, 2])
        client.stop(job, grace_s=PATIENCE_S)
        view = wait_for(client, job, "stopped", "failed")
    assert view["state"] == "stopped", view
    check_one_model(view)


@pytest.mark.long("tests/train/swarm/test_build.py::test_files_of_stages_give_any_number_of_stages")
def test_a_stopped_mixed_run_goes_on_with_more_stages(atoll: Atoll) -> None:
    text = saved(job_of(atoll, steps=ENDLESS, nodes="3", strategy=DILOCO, whole=1))
    known, job = begin(atoll, text, slots=4)
    with known.client() as client:
        told(client, job, "checkpoint of round 20 is complete")
        client.stop(job, grace_s=PATIENCE_S)
        view = wait_for(client, job, "stopped", "failed")
        check_one_model(view)
        before = max(result["steps"] for result in results_of(view) if result["stage"] >= 0)
        until(lambda: not atoll.workers())
        later = saved(job_of(atoll, steps=ENDLESS, nodes="4", strategy=DILOCO, whole=1))
        assert client.resume(job, spec=later.replace("stages = 2", "stages = 3")) == job
        wait_together(client, job, attempts=[1, 2, 2, 2])
        client.stop(job, grace_s=PATIENCE_S)
        view = wait_for(client, job, "stopped", "failed")
        check_one_model(view, stages=3)
        assert min(result["steps"] for result in results_of(view)) > before


@pytest.mark.long(
    "tests/train/swarm/test_member.py::test_a_lost_stage_goes_on_from_a_checkpoint_with_all"
)
def test_when_everything_was_killed_it_goes_on_from_a_save(atoll: Atoll) -> None:
    text = saved(job_of(atoll, steps=ENDLESS, nodes="3", strategy=RARE, whole=1))
    words = ["hub", "--host", "127.0.0.1", "--port", str(free_port())]
    atoll.start(*words)
    known = until(lambda: (atoll.home / "hubs.json").exists() and find(home=atoll.home))
    job = submit(atoll, known, text)
    with known.client() as client:
        told(client, job, "checkpoint of round 20 is complete")
        while_working(client, job, lambda view: int(view["committed_round"]) >= 1)
    for process in atoll.processes():
        with contextlib.suppress(psutil.Error):  # another one's end has ended it
            process.kill()
    atoll.start(*words)
    with known.client() as client:
        until(lambda: answers(client))
        atoll.join(ticket_of(known), name="n0", slots=4)
        wait_together(client, job, attempts=[2, 2, 2])
        client.stop(job, grace_s=PATIENCE_S)
        view = wait_for(client, job, "stopped", "failed")
    assert view["state"] == "stopped", view
    check_one_model(view)


@pytest.mark.parametrize("inner", ["ddp", "fsdp"])
@pytest.mark.long(
    "tests/e2e/test_mesh_products.py::test_pipeline_and_tensor_train_what_one_process_does"
)
def test_an_island_of_ranks_is_a_member_with_the_whole_model(atoll: Atoll, inner: str) -> None:
    """Its last rank is killed: the stages go on, and the island takes over what they agreed on."""
    text = job_of(atoll, steps=ENDLESS, nodes="3", strategy=RARE, whole=1)
    text = text.replace("whole = 1", f'whole = 1\nwhole_inner = "{inner}"')
    known, job = begin(atoll, text + "[island]\nranks = 2\n")
    with known.client() as client:
        until(lambda: int(client.job(job)["committed_round"]) >= 2)
        mine = ranks(atoll, "w0")
        assert len(mine) == 2
        assert not ranks(atoll, "w1"), "members of stages are one process"
        mine[1].kill()
        wait_together(client, job, attempts=[1, 1, 2])
        client.stop(job, grace_s=PATIENCE_S)
        view = wait_for(client, job, "stopped", "failed")
    assert view["state"] == "stopped", view
    assert "whole members" in view["island"]
    check_one_model(view)
