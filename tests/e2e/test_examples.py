"""Every example does what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import Atoll, until
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.e2e

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_every_example_has_a_test_here() -> None:
    assert {path.name for path in EXAMPLES.iterdir() if path.is_file()} == {
        "accelerate_loop.py",  # this one and the two trainers: tests/integrations
        "actors.py",
        "brackets.toml",  # test_rl_text.py
        "docstring_chats.py",  # test_tune.py
        "elastic.toml",
        "embedding_server.py",  # tests/integrations, as the next script
        "fashion_mnist.toml",  # test_model_examples.py, as the next and gpt_fsdp.toml
        "fine_tune.toml",
        "four_laptops.toml",
        "fleet_many.toml",  # a fleet, not a job: `atoll simulate`
        "fsdp_diloco.py",
        "gpt.toml",
        "horovod_script.py",  # tests/integrations
        "gpt_fsdp.toml",
        "lightning_trainer.py",
        "muloco.toml",
        "plain_loop.py",
        "pooled_critic.toml",  # test_rl_example.py
        "README.md",
        "scaling_sweep.toml",  # scaling/test_sweeps.py
        "serve_paths.py",  # tests/integrations
        "transformers_trainer.py",
    }


def test_plain_loop_runs_alone(atoll: Atoll) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "plain_loop.py"), "--steps", "60"],
        cwd=atoll.folder,
        env=atoll.environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "finished with loss" in done.stdout


def test_plain_loop_runs_on_two_nodes(atoll: Atoll) -> None:
    # With fewer the job would be done without a member that the machine keeps waiting for seconds.
    both = ["--set", "job.nodes=2", "--set", "job.min_nodes=2"]
    script = str(EXAMPLES / "plain_loop.py")
    done = atoll.run("run", script, "--local", "2", *both, "--", "--steps", "100")
    assert done.code == 0, done.both
    assert "node0 finished with loss" in done.out
    assert "node1 finished with loss" in done.out
    atoll.assert_ended()


@pytest.mark.long("tests/e2e/test_examples.py::test_plain_loop_runs_on_two_nodes")
def test_actors_and_learner_share_a_queue_on_three_nodes(atoll: Atoll) -> None:
    alone = subprocess.run(
        [sys.executable, str(EXAMPLES / "actors.py"), "--updates", "30"],
        cwd=atoll.folder,
        env=atoll.environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert alone.returncode == 0, alone.stderr
    assert "learned from 30 items of the queue" in alone.stdout
    done = atoll.run("run", str(EXAMPLES / "actors.py"), "--local", "3", "--", "--updates", "30")
    assert done.code == 0, done.both
    assert "learned from 30 items of the queue" in done.out
    atoll.assert_ended()


@pytest.mark.long("tests/e2e/test_training.py::test_three_commands_train_and_collect_the_results")
def test_gpt_runs_on_four_nodes_that_all_contribute(atoll: Atoll) -> None:
    small = ["train.steps=6", "model.layers=1", "model.width=32", "train.batch=2"]
    small += ["strategy.every=3", "job.threads=1", "train.eval_tokens=2048", "train.warmup=2"]
    small += ["checkpoint.every=1", "job.min_nodes=4"]  # no round without one that is late
    words = [word for setting in small for word in ("--set", setting)]
    done = atoll.run("run", str(EXAMPLES / "gpt.toml"), "--local", "4", *words)
    assert done.code == 0, done.both
    folder = atoll.job_folder()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["nodes"] == 4
    assert summary["replicas_identical"] is True
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {row["member"] for row in rows} == {"w0", "w1", "w2", "w3"}
    rounds = json.loads((folder / "rounds.json").read_text())["rounds"]
    assert len(rounds) > 2
    assert all(row["contributors"] == ["w0", "w1", "w2", "w3"] for row in rounds)
    assert (folder / "checkpoints").is_dir()
    atoll.assert_ended()


@pytest.mark.long("tests/config/test_reading.py::test_an_example_is_the_same_job_when_written_out")
def test_muloco_job_runs_on_two_nodes_shortened(atoll: Atoll) -> None:
    small = ["train.steps=6", "model.layers=1", "model.width=32", "train.batch=2"]
    small += ["strategy.every=3", "job.threads=1", "train.eval_tokens=2048", "train.warmup=2"]
    words = [word for setting in small for word in ("--set", setting)]
    done = atoll.run("run", str(EXAMPLES / "muloco.toml"), "--local", "2", *words)
    assert done.code == 0, done.both
    atoll.assert_ended()


@pytest.mark.long("tests/e2e/test_jobs.py::test_failing_job_does_not_affect_two_others")
def test_four_laptops_run_four_jobs_of_one_batch_shortened(atoll: Atoll) -> None:
    small = ["train.steps=6", "model.layers=1", "model.width=32", "train.batch=2"]
    small += ["strategy.every=3", "job.threads=1", "train.eval_tokens=2048", "train.warmup=2"]
    words = [word for setting in small for word in ("--set", setting)]
    done = atoll.run("run", str(EXAMPLES / "four_laptops.toml"), "--local", "4", *words)
    assert done.code == 0, done.both
    models = {path.parent.name for path in atoll.runs.glob("*/model.safetensors")}
    names = {name.rsplit("-", 2)[0] for name in models}  # without date and time
    assert names == {"small-steps", "large-steps", "wide", "deep"}
    atoll.assert_ended()


@pytest.mark.long("tests/e2e/test_elastic.py::test_killed_members_resume_and_leaver_is_replaced")
def test_elastic_job_survives_a_killed_worker(atoll: Atoll) -> None:
    small = ["train.steps=100000", "model.layers=1", "model.width=32", "train.batch=2"]
    small += ["strategy.every=5", "job.threads=1", "train.eval_tokens=2048", "checkpoint.every=1"]
    words = [word for setting in small for word in ("--set", setting)]
    running = atoll.start("run", str(EXAMPLES / "elastic.toml"), "--local", "3", *words)

    def told(kind: str) -> list[dict[str, str]]:
        files = list(atoll.runs.glob("*/events.jsonl"))
        lines = files[0].read_text().splitlines(keepends=True) if files else []
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in events if event["kind"] == kind]

    def contributors() -> list[int]:
        files = list(atoll.runs.glob("*/metrics.jsonl"))
        lines = files[0].read_text().splitlines(keepends=True) if files else []
        values = [json.loads(line)["values"] for line in lines if line.endswith("\n")]
        return [int(found["contributors"]) for found in values if "contributors" in found]

    until(lambda: told("checkpoint") and contributors()[-1:] == [3])  # it is under way
    victim = atoll.worker("w1")
    victim.kill()
    until(lambda: 2 in contributors())
    (recovered,) = until(lambda: told("recovered"))
    assert recovered["member"] == "w1"
    assert " caught up (" in recovered["text"]
    until(lambda: contributors()[-1] == 3)
    running.interrupt()
    done = running.wait()
    assert done.code == 130, done.both
    assert "w1" in done.out, "the loss of a member is told"
    atoll.assert_ended()
