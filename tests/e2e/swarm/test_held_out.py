"""A SWARM of real processes measures the held-out loss that its model has in one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from atoll.config import parse_spec
from atoll.net.http.client import HubClient
from atoll.train.build import build
from atoll.train.evaluate import Evaluation, evaluate
from atoll.train.results.sample import load_model
from atoll.train.results.summary import held_out_losses, summarise
from atoll.wire.manifest import MANIFEST_NAME, checkpoint_folder, decode_manifest
from tests.e2e.conftest import Atoll, until, wait_for
from tests.e2e.swarm.test_runs import begin, check_end, job_of, results_of, stages_of

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(os.name != "posix", reason="kill -9 is a signal of POSIX"),
]

Losses = list[tuple[int, int, float]]


def losses_of(client: HubClient, job: str) -> Losses:
    """Return step, round and held-out loss of all evaluations; each MUST be stored once."""
    points = client.metrics(job)["points"]
    steps = [p["step"] for p in points if p["values"].keys() & {"held_out_tokens", "held_out_loss"}]
    assert len(steps) == len(set(steps))
    return held_out_losses(points)


def measured_by_one(text: str, *, model: Path | None = None) -> Evaluation:
    """Return what one process measures of saved weights, or of the initial ones in part."""
    spec = parse_spec(text)
    built = build(spec, member="w0", slot=0, num_slots=1)
    if model is None:
        return evaluate(built.model, built.held_out, limit_tokens=spec.train.eval_tokens)
    return evaluate(load_model(model)[0], built.held_out)


def check_losses(client: HubClient, job: str, text: str, found: Losses, folder: Path) -> None:
    """The first and the last figure are those of one process with the same weights."""
    path = folder / "model.safetensors"
    client.get_file(job, "model.safetensors", path)
    assert found[0][2] == pytest.approx(measured_by_one(text).loss, rel=1e-5)
    assert found[-1][2] == pytest.approx(measured_by_one(text, model=path).loss, rel=1e-5)
    assert found[-1][2] < found[0][2]


def score_of(client: HubClient, job: str, step: int) -> float | None:
    data = client.read_file(job, f"{checkpoint_folder(step)}/{MANIFEST_NAME}")
    return decode_manifest(data).score


def summary_of(client: HubClient, job: str, text: str, view: dict[str, Any]) -> dict[str, Any]:
    results = {member["member"]: member["result"] for member in view["members"]}
    return summarise(
        job=job, spec=parse_spec(text), results={n: r for n, r in results.items() if r},
        points=client.metrics(job)["points"],
    )  # fmt: skip


@pytest.mark.long(
    "tests/train/swarm/test_evaluating.py::test_one_member_per_stage_measures_what_one_process_does"
)
def test_a_swarm_is_measured_and_keeps_its_best_state(atoll: Atoll) -> None:
    text = job_of(atoll, steps=12).replace("eval_tokens = 512", "eval_tokens = 512\neval_every = 4")
    text += "[checkpoint]\nevery = 4\nkeep = 1\nkeep_best = 3\n"
    known, job = begin(atoll, text)
    with known.client() as client:
        view = wait_for(client, job, "done", "failed")
        check_end(view, text)
        found = losses_of(client, job)
        assert [step for step, _, _ in found] == [0, 4, 8, 12]
        check_losses(client, job, text, found, atoll.folder)
        summary = summary_of(client, job, text, view)
        assert (summary["loss_first"], summary["loss_final"]) == (found[0][2], found[-1][2])
        assert summary["best_single_node_tokens_per_s"] is None
        assert client.job(job)["held_out_loss"] == found[-1][2]
        scores = {step: score_of(client, job, step) for step in (4, 8, 12)}
    assert scores == {step: loss for step, _, loss in found if step}


@pytest.mark.long(
    "tests/train/swarm/test_evaluating.py::test_members_killed_in_an_evaluation_change_nothing"
)
def test_a_kill_in_an_evaluation_changes_no_figure(atoll: Atoll) -> None:
    """Of each stage a member is killed while the last state is measured, on all held-out data."""
    text = job_of(atoll, steps=6).replace("microbatches = 4", "microbatches = 8")
    # 540 microbatches: long enough to be killed in, and through on a busy machine while it waits.
    text = text.replace("[train]", "held_out = 0.12\n[train]")
    known, job = begin(atoll, text)
    with known.client() as client:
        stages = until(lambda: stages_of(client.job(job), count=4))
        until(lambda: under_way(client, job, step=6))
        for stage in range(2):
            victim = next(member for member, served in stages.items() if served == stage)
            atoll.worker(victim).kill()
        assert under_way(client, job, step=6), "killed too late"
        view = wait_for(client, job, "done", "failed")
        assert view["state"] == "done"
        assert sorted(member["attempt"] for member in view["members"])[-1] == 2
        found = losses_of(client, job)
        check_losses(client, job, text, found, atoll.folder)
    assert found[-1][0] == 6


def under_way(client: HubClient, job: str, *, step: int) -> bool:
    """Return whether some of the evaluation of this step is measured, and some is not."""
    swarm: Any = client.job(job)["swarm"]
    if not swarm or swarm["step"] != step:
        return False
    return 0 < int(swarm["measured"]) < int(swarm["to_measure"]) - 8


@pytest.mark.long(
    "tests/train/swarm/test_outer.py::test_dropped_updates_are_not_in_what_is_measured"
)
def test_stages_that_meet_rarely_are_measured_where_they_agree(atoll: Atoll) -> None:
    strategy = 'preset = "diloco"\nevery = 3\nouter_lr = 0.8\ncodec = "fp32"\nwarmup_steps = 0'
    text = job_of(atoll, steps=11, strategy=strategy)
    text = text.replace("eval_tokens = 512", "eval_tokens = 512\neval_every = 2")
    known, job = begin(atoll, text)
    with known.client() as client:
        view = wait_for(client, job, "done", "failed")
        assert view["state"] == "done", view
        found = losses_of(client, job)
        assert [(step, round_) for step, round_, _ in found] == [(0, 0), (6, 2), (11, 4)]
        check_losses(client, job, text, found, atoll.folder)
    for stage in range(2):
        assert len({r["digest"] for r in results_of(view) if r["stage"] == stage}) == 1


@pytest.mark.long("tests/train/swarm/test_build.py::test_stages_measure_what_the_trainer_would")
def test_members_with_the_whole_model_measure_alone(atoll: Atoll) -> None:
    strategy = 'preset = "diloco"\nevery = 4\nouter_lr = 0.8\ncodec = "fp32"\nwarmup_steps = 0'
    text = job_of(atoll, steps=8, nodes="3", strategy=strategy, whole=1)
    text += "[checkpoint]\nevery = 4\n"
    known, job = begin(atoll, text)
    with known.client() as client:
        view = wait_for(client, job, "done", "failed")
        assert view["state"] == "done", view
        found = losses_of(client, job)
        check_losses(client, job, text, found, atoll.folder)
        summary = summary_of(client, job, text, view)
        points = client.metrics(job)["points"]
    assert summary["loss_final"] == pytest.approx(found[-1][2])
    assert summary["loss_first"] == pytest.approx(found[0][2])
    assert summary["sample"]
    shares = {p["member"]: p["values"] for p in points if p["values"].get("held_out_tokens")}
    whole = measured_by_one(text)
    assert {member: s["held_out_tokens"] for member, s in shares.items()} == {"w0": whole.tokens}
