"""A SWARM of real processes trains the model that one process trains."""

from __future__ import annotations

import copy
import os
import random
from typing import Any

import pytest

from atoll.cli.hub_access import KnownHub, find
from atoll.config import JobSpec, parse_spec
from atoll.data import BatchStream
from atoll.errors import AtollError
from atoll.net.http.client import HubClient
from atoll.train.build import build
from bench.kit.ports import free_port
from tests.e2e.conftest import ENDLESS, Atoll, ticket_of, until, wait_for
from tests.patience import PATIENCE_S

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(os.name != "posix", reason="kill -9 is a signal of POSIX"),
]

BATCH = 8
JOB = """
[job]
name = "tiny"
nodes = {nodes}
[model]
name = "gpt"
layers = 2
width = 16
heads = 2
context = 16
[data]
corpus = "files:{text}"
[train]
steps = {steps}
batch = 8
lr = 4e-3
warmup = 5
clip = 1e6   # of a stage, or of the whole model: not the same
eval_tokens = 512
[strategy]
{strategy}
[swarm]
stages = 2
whole = {whole}
microbatches = 4
codec = "fp32"
rebalance_s = 0
"""


def job_of(
    atoll: Atoll, *, steps: int, nodes: str = "4", strategy: str = 'preset = "swarm"',
    whole: int = 0,
) -> str:  # fmt: skip
    text = atoll.folder / "text.txt"
    words = random.Random(5)
    known = ["".join(words.choices("abcdefgh", k=5)) for _ in range(50)]
    text.write_text(" ".join(words.choices(known, k=12_000)))
    return JOB.format(text=text, steps=steps, nodes=nodes, strategy=strategy, whole=whole)


def losses_of_one_process(spec: JobSpec, *, steps: int) -> list[float]:
    """Return the losses; early rows are computed on the weights of the step before."""
    built = build(spec, member="w0", slot=0, num_slots=1)
    stream, losses = BatchStream(built.shards, slot=0, batch=spec.train.batch), []
    rows = spec.train.batch // spec.swarm.microbatches * spec.swarm.early_microbatches
    share, older = rows / spec.train.batch, copy.deepcopy(built.model)
    for _ in range(steps):
        inputs, targets = next(stream)
        loss = (1 - share) * built.model.loss(inputs[rows:], targets[rows:])
        built.task.optimizer.zero_grad()
        loss.backward()
        if rows:
            older.zero_grad()
            first = share * older.loss(inputs[:rows], targets[:rows])
            first.backward()
            loss = loss + first
            for own, late in zip(built.model.parameters(), older.parameters(), strict=True):
                own.grad += late.grad
            older.load_state_dict(built.model.state_dict())
        built.task.optimizer.step()
        built.task.advance()
        losses.append(float(loss.detach()))
    return losses


def results_of(view: dict[str, Any]) -> list[dict[str, Any]]:
    return [member["result"] for member in view["members"] if member["result"]]


def check_end(view: dict[str, Any], text: str, *, members: int = 4) -> None:
    """All members ended at one step, all rows counted once per stage, the loss is as expected."""
    steps, loss = check_counts(view, members=members)
    expected = losses_of_one_process(parse_spec(text), steps=steps)[-1]
    # Sums in another order differ in the last bit, which grows from step to step.
    assert loss == pytest.approx(expected, rel=1e-3 * max(1.0, steps / 50))


def check_counts(view: dict[str, Any], *, members: int = 4) -> tuple[int, float]:
    """All members of a stage have the same weights, and counted every row once in the last step.

    Return the steps of all members, and the loss of the last one.
    """
    assert view["state"] in ("done", "stopped"), view
    results = results_of(view)
    assert len(results) == members
    for stage in {result["stage"] for result in results}:
        there = [result for result in results if result["stage"] == stage]
        assert len({result["digest"] for result in there}) == 1
        assert sum(result["rows"] for result in there) == BATCH
    (steps,) = {result["steps"] for result in results}
    last = [result for result in results if result.get("loss") is not None]
    return steps, sum(result["loss"] * result["rows"] for result in last) / BATCH


def begin(atoll: Atoll, text: str, *, slots: int = 4) -> tuple[KnownHub, str]:
    known = atoll.hub()
    return known, submit(atoll, known, text, slots=slots)


def submit(atoll: Atoll, known: KnownHub, text: str, *, slots: int = 4) -> str:
    """Start a node with so many places, and a job on it."""
    with known.client() as client:
        until(lambda: answers(client))
        atoll.join(ticket_of(known), name="n0", slots=slots)
        until(client.nodes)
        return client.submit(text)


def answers(client: HubClient) -> bool:
    try:
        client.health()
    except AtollError:
        return False
    return True


def wait_together(client: HubClient, job: str, *, attempts: list[int]) -> None:
    """Wait until members of these attempts are there, and all of them have done further steps."""

    def members() -> list[dict[str, Any]]:
        return list(client.job(job)["members"])

    until(lambda: sorted(member["attempt"] for member in members()) == attempts)
    newest = max(int(member["step"] or 0) for member in members())
    until(lambda: all(int(member["step"] or 0) > newest for member in members()))


def stages_of(view: dict[str, Any], *, count: int) -> dict[str, int] | None:
    """Return the stage of each member once so many have reported theirs."""
    found = {m["member"]: int(m["values"].get("stage", -1)) for m in view["members"]}
    return found if sum(stage >= 0 for stage in found.values()) == count else None


@pytest.mark.long(
    "tests/train/swarm/test_member.py::test_a_swarm_in_a_subspace_trains_the_confined_model"
)
def test_stages_in_a_subspace_agree(atoll: Atoll) -> None:
    text = job_of(atoll, steps=12).replace('codec = "fp32"', 'codec = "subspace:4|int8"')
    known, job = begin(atoll, text)
    with known.client() as client:
        view = wait_for(client, job, "done", "failed")
    steps, found = check_counts(view)
    whole = losses_of_one_process(parse_spec(text), steps=steps)
    assert whole[-1] - 0.1 < found < whole[0]  # restricted, but it learns


@pytest.mark.long(
    "tests/train/swarm/test_member.py::test_two_members_per_stage_train_the_same_model"
)
def test_two_members_per_stage_train_what_one_process_does(atoll: Atoll) -> None:
    text = job_of(atoll, steps=12)
    known, job = begin(atoll, text)
    with known.client() as client:
        view = wait_for(client, job, "done", "failed")
    check_end(view, text)
    assert {result["steps"] for result in results_of(view)} == {12}


@pytest.mark.long(
    "tests/group/peers/test_nearest.py::test_a_moved_member_is_reached_at_its_new_address"
)
def test_members_that_reach_each_other_send_directly(atoll: Atoll) -> None:
    text = job_of(atoll, steps=ENDLESS)
    known, job = begin(atoll, text)

    def shares() -> list[float | None]:
        view = client.job(job)["swarm"]
        return [peer["direct"] for stage in view["stages"] for peer in stage["peers"]]

    with known.client() as client:
        until(lambda: stages_of(client.job(job), count=4))
        # The first messages are relayed while the connections are made.
        until(lambda: all(share is not None and share > 0.9 for share in shares()))
        client.stop(job, grace_s=PATIENCE_S)
        view = wait_for(client, job, "stopped", "failed")
    check_end(view, text)


@pytest.mark.long(
    "tests/train/swarm/test_member.py::test_members_join_and_a_killed_driver_is_replaced"
)
def test_kills_in_every_stage_and_a_late_member_change_nothing(atoll: Atoll) -> None:
    text = job_of(atoll, steps=ENDLESS, nodes="{ min = 4, max = 5 }")
    # Members that wait for a new one would take all processor time.
    text = text.replace('name = "gpt"', 'name = "tests.paced:gpt"\ntie = false')
    known, job = begin(atoll, text)
    with known.client() as client:
        stages = until(lambda: stages_of(client.job(job), count=4))
        until(lambda: int(client.job(job)["committed_round"]) >= 5)
        for stage in range(2):
            victim = next(member for member, served in stages.items() if served == stage)
            atoll.worker(victim).kill()
        atoll.join(ticket_of(known), name="n1", slots=1)
        wait_together(client, job, attempts=[1, 1, 1, 2, 2])
        client.stop(job, grace_s=PATIENCE_S)
        view = wait_for(client, job, "stopped", "failed")
    check_end(view, text, members=5)


@pytest.mark.long("tests/train/swarm/test_member.py::test_a_kill_does_not_change_what_is_early")
def test_a_kill_changes_nothing_of_an_asynchronous_schedule(atoll: Atoll) -> None:
    text = late_job(atoll)
    known, job = begin(atoll, text)
    with known.client() as client:
        stages = until(lambda: stages_of(client.job(job), count=4))
        until(lambda: int(client.job(job)["committed_round"]) >= 5)
        for stage in range(2):
            victim = next(member for member, served in stages.items() if served == stage)
            atoll.worker(victim).kill()
        wait_together(client, job, attempts=[1, 1, 2, 2])
        client.stop(job, grace_s=PATIENCE_S)
        view = wait_for(client, job, "stopped", "failed")
    check_end(view, text)


def late_job(atoll: Atoll) -> str:
    """Return an asynchronous job; NAdam would turn the rounding of sums into one percent."""
    text = job_of(atoll, steps=ENDLESS).replace("[swarm]", '[swarm]\nschedule = "async"')
    text = text.replace("lr = 4e-3", "lr = 0.02")
    return text.replace("[train]", '[train]\noptimizer = "sgd"\nmomentum = 0.9').replace(
        "[strategy]", "[train.options]\nnesterov = true\n[strategy]"
    )


@pytest.mark.long("tests/swarm/test_saves.py::test_after_a_restart_the_newest_history_is_believed")
@pytest.mark.parametrize("late", [False, True])
def test_a_hub_that_is_killed_makes_the_swarm_wait_only(atoll: Atoll, late: bool) -> None:
    text = late_job(atoll) if late else job_of(atoll, steps=ENDLESS)
    words = ["hub", "--host", "127.0.0.1", "--port", str(free_port())]
    hub = atoll.start(*words)
    known = until(lambda: (atoll.home / "hubs.json").exists() and find(home=atoll.home))
    job = submit(atoll, known, text)
    with known.client() as client:
        until(lambda: int(client.job(job)["committed_round"]) >= 5)
    hub.popen.kill()
    hub.wait()
    atoll.start(*words)
    with known.client() as client:
        until(lambda: answers(client))
        before = int(client.job(job)["committed_round"])
        until(lambda: int(client.job(job)["committed_round"]) > before)
        wait_together(client, job, attempts=[1, 1, 1, 1])
        client.stop(job, grace_s=PATIENCE_S)
        view = wait_for(client, job, "stopped", "failed")
    check_end(view, text)


def test_one_member_per_stage_averages_with_itself(atoll: Atoll) -> None:
    text = job_of(atoll, steps=8, nodes="2", strategy='outer = "average"\nevery = 3')
    known, job = begin(atoll, text)
    with known.client() as client:
        view = wait_for(client, job, "done", "failed")
    check_end(view, text, members=2)
    assert {result["rounds"] for result in results_of(view)} == {3}


@pytest.mark.long(
    "tests/train/swarm/test_outer.py::test_a_newcomer_starts_from_what_was_agreed_and_its_momentum"
)
def test_stages_meet_every_few_steps_though_a_member_is_killed(atoll: Atoll) -> None:
    strategy = 'preset = "diloco"\nevery = 5\nouter_lr = 0.8\ncodec = "feedback(int8)"'
    text = job_of(atoll, steps=ENDLESS, strategy=strategy)
    known, job = begin(atoll, text)
    with known.client() as client:
        stages = until(lambda: stages_of(client.job(job), count=4))
        until(lambda: int(client.job(job)["committed_round"]) >= 2)
        atoll.worker(next(member for member in stages if stages[member] == 0)).kill()
        wait_together(client, job, attempts=[1, 1, 1, 2])
        client.stop(job, grace_s=PATIENCE_S)
        view = wait_for(client, job, "stopped", "failed")
    results = results_of(view)
    assert len(results) == 4
    for stage in range(2):
        assert len({r["digest"] for r in results if r["stage"] == stage}) == 1
    (steps,) = {result["steps"] for result in results}
    expected = losses_of_one_process(parse_spec(text), steps=steps)
    loss = min(result["loss"] for result in results if result.get("loss") is not None)
    assert loss < 0.5 * (expected[0] + expected[-1]), "it learns about as much"
