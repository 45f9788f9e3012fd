"""The example of a pooled critic from the command to what it leaves behind, shortened."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from tests.e2e.conftest import Atoll
from tests.rl.box2d import NEEDS_BOX2D

pytestmark = pytest.mark.e2e

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pooled_critic.toml"
POLICIES = ("cart", "acrobat", "pendulum", "lander")
SHORT = ("rl.rollout=32", "rl.epochs=1", "rl.critic_epochs=1")


@NEEDS_BOX2D
@pytest.mark.long("tests/e2e/test_rl.py::test_rl_members_resume_after_kill_leave_or_stop")
def test_example_ends_with_table_report_and_episodes(
    atoll: Atoll,
) -> None:
    words = [word for setting in SHORT for word in ("--set", setting)]
    short = atoll.folder / "short.toml"
    text = EXAMPLE.read_text(encoding="utf-8")
    short.write_text(re.sub(r"(?m)^steps = \S+", "steps = 1500", text))
    done = atoll.run("run", str(short), "--local", "5", *words)
    assert done.code == 0, done.both
    folder = atoll.job_folder()
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    rl = summary["rl"]
    assert [policy["policy"] for policy in rl["policies"]] == list(POLICIES)
    for policy in rl["policies"]:
        assert policy["finished"]
        assert policy["env_steps"] >= 1500
        assert policy["updates"] >= 5
        assert policy["policy"] in done.out
        with Image.open(folder / policy["gif"]) as film:
            assert getattr(film, "n_frames", 1) > 5
    critic = rl["critic_member"]
    sent = sum(policy["updates"] for policy in rl["policies"])
    assert critic["trajectories"] == sent  # each was learned from, once
    assert sum(critic["staleness"].values()) == sent
    assert f"{critic['trajectories']} trajectories in" in done.out
    report = (folder / "report.html").read_text(encoding="utf-8")
    assert report.count("src='data:image/gif;base64,") == len(POLICIES)
    atoll.assert_ended()


def test_unknown_environment_is_named_before_the_start(atoll: Atoll) -> None:
    wrong = atoll.folder / "wrong.toml"
    wrong.write_text(EXAMPLE.read_text(encoding="utf-8").replace("Acrobot-v1", "Acrobat-v1"))
    done = atoll.run("run", str(wrong), "--local", "5")
    assert done.code == 2, done.both
    assert "the environment of policy acrobat cannot be made" in done.err
    assert "Did you mean: `Acrobot`" in done.err
    assert not atoll.runs.exists()
