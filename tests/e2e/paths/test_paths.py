"""Members of real processes train the paths of a model, are stopped, and go on."""

from __future__ import annotations

import os
import random

import pytest

from atoll.net.http.client import HubClient
from tests.e2e.conftest import Atoll, ticket_of, until, wait_for
from tests.e2e.swarm.test_runs import answers
from tests.patience import PATIENCE_S

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(os.name != "posix", reason="kill -9 is a signal of POSIX"),
]

JOB = """
[job]
name = "paths"
nodes = {{ min = 1, max = {nodes} }}
[model]
name = "tests.paced:gpt"
layers = 2
width = 16
heads = 2
context = 16
tie = false
[data]
corpus = "files:{text}"
[train]
steps = {steps}
batch = 4
lr = 4e-3
eval_tokens = 512
[strategy]
preset = "dipaco"
every = {every}
[dipaco]
modules = {modules}
held_out = 0.1
[checkpoint]
every = {save}
"""


def job_of(
    atoll: Atoll, *, nodes: int = 4, steps: int = 40, every: int = 10, modules: str = "[2, 2]",
    save: int = 1,
) -> str:  # fmt: skip
    text = atoll.folder / "text.txt"
    words = random.Random(5)
    known = ["".join(words.choices("abcdefgh", k=5)) for _ in range(50)]
    text.write_text(" ".join(words.choices(known, k=12_000)))
    return JOB.format(text=text, nodes=nodes, steps=steps, every=every, modules=modules, save=save)


def check_end(client: HubClient, job: str, *, paths: int = 4, modules: int = 4) -> None:
    """All paths are exported, and every holder of a module ended with the same bits."""
    view = wait_for(client, job, "done", "failed")
    assert view["state"] == "done", view
    results = [member["result"] for member in view["members"] if member["result"]]
    digests: dict[str, set[str]] = {}
    for result in results:
        for module, digest in result["modules"].items():
            digests.setdefault(module, set()).add(digest)
    assert len(digests) == modules
    assert all(len(found) == 1 for found in digests.values()), digests
    assert "alarm:replica-differs" not in events_of(client, job)
    names = {file.name for file in client.files(job)}
    assert {f"path-{path:04d}.safetensors" for path in range(paths)} <= names
    shown = view["paths"]["paths"]
    assert [one["state"] for one in shown] == ["done"] * paths
    assert all(one["tokens"] and one["loss"] and one["best_step"] for one in shown), shown


def events_of(client: HubClient, job: str) -> list[str]:
    return [event["kind"] for event in client.events(job)["events"]]


def step_of(client: HubClient, job: str) -> int:
    return max(int(member["step"] or 0) for member in client.job(job)["members"])


def test_two_members_train_four_paths(atoll: Atoll) -> None:
    known = atoll.hub()
    with known.client() as client:
        until(lambda: answers(client))
        atoll.join(ticket_of(known), name="n0", slots=2)
        until(client.nodes)
        job = client.submit(job_of(atoll, nodes=2))
        check_end(client, job)


@pytest.mark.long(
    "tests/paths/test_ledger.py::test_all_go_back_to_the_checkpoint_if_nobody_is_left"
)
def test_a_stopped_job_goes_on_from_its_checkpoint(atoll: Atoll) -> None:
    known = atoll.hub()
    with known.client() as client:
        until(lambda: answers(client))
        atoll.join(ticket_of(known), name="n0", slots=2)
        until(client.nodes)
        job = client.submit(job_of(atoll, nodes=2, steps=400, every=20))
        until(lambda: step_of(client, job) >= 60)
        client.stop(job, grace_s=PATIENCE_S)
        assert wait_for(client, job, "stopped", "failed", "done")["state"] == "stopped"
        before = step_of(client, job)
        client.resume(job)
        until(lambda: step_of(client, job) > before)
        check_end(client, job)
        assert "alarm:rewound" not in events_of(client, job)
