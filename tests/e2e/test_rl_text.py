"""Language models that learn by rewards, on real processes."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.e2e.conftest import Atoll, until

pytestmark = pytest.mark.e2e

EXAMPLE = Path(__file__).parents[2] / "examples" / "brackets.toml"

SMALLER = {
    "layers": "1", "width": "16", "heads": "2", "environments": "8", "group": "4", "epochs": "1",
    "minibatches": "1", "critic_epochs": "1", "critic_minibatches": "1",
}  # fmt: skip

UPDATES = 24


def write_job(atoll: Atoll) -> Path:
    """Write the example with a tiny model and little to do."""
    text = EXAMPLE.read_text()
    for name, value in SMALLER.items():
        text, count = re.subn(rf"(?m)^{name} = \S+", f"{name} = {value}", text)
        assert count == 1, name
    text, count = re.subn(r"(?m)^steps = 1000\b", "steps = 20", text)
    assert count == 1
    text, count = re.subn(r"(?m)^steps = 6_400\b", f"steps = {32 * UPDATES}\nsave_every = 2", text)
    assert count == 1
    path = atoll.folder / "brackets.toml"
    path.write_text(text)
    return path


@pytest.mark.long("tests/rl/text/test_in_process.py::test_rewards_teach_what_examples_did_not")
def test_language_models_share_a_critic_and_survive_a_kill(atoll: Atoll) -> None:
    running = atoll.start("run", str(write_job(atoll)), "--local", "3")
    metrics = until(lambda: next(atoll.runs.glob("*/metrics.jsonl"), None))

    def learning() -> bool:
        """Return whether a policy has learned, and been saved, a few times."""
        lines = metrics.read_text().splitlines(keepends=True)
        points = [json.loads(line)["values"] for line in lines if line.endswith("\n")]
        return any(p.get("updates", 0) >= 4 and "kl_reference" in p for p in points)

    until(learning)
    victim = atoll.worker("w1")
    os.kill(victim.pid, 9)
    done = running.wait()
    assert done.code == 0, done.both
    folder = atoll.job_folder()
    told = json.loads((folder / "summary.json").read_text())["rl"]
    assert {policy["policy"] for policy in told["policies"]} == {"brackets", "expressions"}
    for policy in told["policies"]:
        assert policy["updates"] == UPDATES
        assert policy["episodes"] == 32 * UPDATES
        assert (folder / f"policy-{policy['policy']}.safetensors").exists()
    assert told["critic_member"]["updates"] > 0
    written = atoll.run("generate", str(folder / "policy-brackets.safetensors"), "--prompt", "((")
    assert written.code == 0, written.both


@pytest.mark.long(
    "tests/rl/text/test_rollouts.py::test_a_trainer_learns_from_what_two_others_wrote"
)
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_trainer_and_a_rollout_worker_are_killed(atoll: Atoll, algorithm: str) -> None:
    path = write_job(atoll)
    text = path.read_text().partition('[[rl.policies]]\nname = "expressions"')[0]
    text = text.replace('algorithm = "ppo"', f'algorithm = "{algorithm}"')
    path.write_text(f"{text}\nsamplers = 2\n")
    first = int(algorithm == "ppo")  # after the member of the value model
    running = atoll.start("run", str(path), "--local", str(3 + first))
    metrics = until(lambda: next(atoll.runs.glob("*/metrics.jsonl"), None))

    def updates() -> int:
        lines = metrics.read_text().splitlines(keepends=True)
        points = [json.loads(line)["values"] for line in lines if line.endswith("\n")]
        return int(max((p.get("updates", 0) for p in points), default=0))

    until(lambda: updates() >= 2)
    os.kill(atoll.worker(f"w{first + 1}").pid, 9)
    until(lambda: updates() >= 4)
    os.kill(atoll.worker(f"w{first}").pid, 9)
    done = running.wait()
    assert done.code == 0, done.both
    told = json.loads((atoll.job_folder() / "summary.json").read_text())["rl"]
    (policy,) = told["policies"]
    assert (policy["updates"], policy["episodes"]) == (UPDATES, 32 * UPDATES)
    assert (told["critic_member"] is not None) == (algorithm == "ppo")
