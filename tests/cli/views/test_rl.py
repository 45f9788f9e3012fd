"""The view of policies that learn, and the table at their end, drawn into strings."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from atoll.cli.views.job import (
    CRITIC_AWAY_S,
    MAX_RETURNS,
    Returns,
    Watched,
    sparkline,
)
from atoll.cli.views.live import View, plain_line
from atoll.cli.views.rl import rl_table
from atoll.config import parse_spec
from atoll.hub.jobs.descriptions import describe_roles
from atoll.train.results.summary import summarise

SPEC = """
[job]
name = "balance"
[rl]
steps = 1000
[[rl.policies]]
name = "earth"
env = "CartPole-v1"
[[rl.policies]]
name = "moon"
env = "worlds.low:make_cartpole"
"""


def member(slot: int, *, state: str = "running", **values: float) -> dict[str, Any]:
    return {
        "member": f"w{slot}", "node": f"lap{slot}", "slot": slot, "state": state, "step": 0,
        "values": values,
    }  # fmt: skip


def actor(slot: int, *, state: str = "running", **values: float) -> dict[str, Any]:
    report = {
        "env_steps": 300.0 * slot, "env_steps_per_s": 1000.0, "return": 50.0 * slot,
        "return_best": 60.0 * slot, "value_version": 12.0, "queue_wait_s": 1.25,
        "value_age_s": 0.5,
    }  # fmt: skip
    return member(slot, state=state, **{**report, **values})


def watched(*members: dict[str, Any], **changes: Any) -> Watched:
    view = {
        "job": "balance-1", "kind": "rl", "state": "running", "reason": "", "nodes_wanted": 3,
        "roles": describe_roles(parse_spec(SPEC)), "members": list(members),
        "progress": {"step": 450, "steps": 1000, "left_s": 1.2}, **changes,
    }  # fmt: skip
    job = Watched("balance-1", view=view)
    for rise in range(40):
        for slot, value in ((1, float(rise)), (2, 40.0 - rise)):
            job.returns.take({"member": f"w{slot}", "values": {"return": value}})
    return job


def critic() -> dict[str, Any]:
    return member(
        0, value_version=14.0, trajectories=1234.0, value_loss=0.25, queue_depth=3.0, staleness=0.4
    )


def picture(job: Watched) -> str:
    console = Console(file=io.StringIO(), force_terminal=True, width=118, record=True)
    with View(console, dashboard="http://127.0.0.1:1/?token=x") as view:
        view.show(job)
    return console.export_text()


def row(text: str, word: str) -> str:
    return next(line for line in text.splitlines() if word in line)


def test_policies_have_rows_and_the_critic_one_below() -> None:
    shown = picture(watched(critic(), actor(1), actor(2)))
    earth, moon, line = (row(shown, word) for word in ("earth", "moon", "critic lap0"))
    for words in ("CartPole-v1", "50.0", "60.0", "▁▁▁▂▂", "300", "1.0 k", "v12", "1.2 s"):
        assert words in earth, words
    assert "make_cartpole" in moon
    assert "█▇▇" in moon
    for words in ("version 14", "trajectories 1.2 k", "loss 0.250", "queue 3", "staleness 0.4"):
        assert words in line, words
    assert "45%" in shown
    assert "2.0 k steps/s" in shown


def test_absent_actor_and_critic_are_named() -> None:
    shown = picture(
        watched(critic() | {"state": "lost"}, actor(1, state="lost"), actor(2, value_age_s=42.0))
    )
    assert "earth lost" in shown
    assert "v12, silent 42 s" in row(shown, "moon")
    assert "critic lap0 lost" in shown
    assert "silent" not in row(shown, "earth")  # no member waits for a critic there
    assert CRITIC_AWAY_S < 42


def test_a_plain_line_names_every_policy_and_its_return() -> None:
    line = plain_line(watched(critic(), actor(1), actor(2)))
    assert line.startswith("balance-1 running | steps 45% | ETA 0:01 | earth 50.0 | moon 100")
    assert line.endswith("critic v14")


def test_before_the_first_episode_there_is_a_dash_and_no_curve() -> None:
    job = watched(critic(), member(1), member(2))
    job.returns = Returns()
    assert " - " in row(picture(job), "earth")
    assert "earth -" in plain_line(job)


def test_a_sparkline_keeps_its_width_and_its_ends() -> None:
    assert sparkline([], width=10) == ""
    assert sparkline([5.0, 5.0], width=10) == "▁▁"
    line = sparkline([float(n) for n in range(1000)], width=20)
    assert (len(line), line[0], line[-1]) == (20, "▁", "█")


def test_returns_of_a_long_run_stay_bounded_and_keep_their_past() -> None:
    returns = Returns()
    for n in range(10 * MAX_RETURNS):
        returns.take({"member": "w1", "values": {"return": float(n)}})
    kept = returns.by_member["w1"]
    assert len(kept) <= MAX_RETURNS
    assert kept == sorted(kept)
    assert kept[0] == 0.0


@pytest.mark.parametrize("finished", [True, False])
def test_the_table_at_the_end_says_what_each_policy_came_to(finished: bool) -> None:
    report = {
        "role": "actor", "env_steps": 1000, "episodes": 30, "return_first": 20.0,
        "return_last": 480.0, "return_best": 500.0, "updates": 9, "dropped": {"not_finite": 2},
        "queue_wait_s": 0.5, "sent_bytes": 32_000, "gif": "episodes/earth.gif",
    }  # fmt: skip
    judge = {
        "role": "critic", "updates": 7, "trajectories": 18, "staleness": {"0": 10, "2": 8},
        "dropped": {"stale": 3},
    }  # fmt: skip
    results = {"w0": {"rl": judge, "wall_s": 10.0}, "w1": {"rl": report, "wall_s": 10.0}}
    if finished:
        results["w2"] = {"rl": report | {"return_last": 10.0, "dropped": {}}, "wall_s": 10.0}
    summary = summarise(
        job="balance-1", spec=parse_spec(SPEC), results=results, points=[],
    )  # fmt: skip
    console = Console(file=io.StringIO(), width=100, record=True)
    console.print(rl_table(summary))
    shown = console.export_text()
    assert row(shown, "earth").split()[1:] == [
        "CartPole-v1", "20.0", "480", "500", "30", "1.0", "k", "9"
    ]  # fmt: skip
    assert ("unfinished" in row(shown, "moon")) is not finished
    assert "18 trajectories in 7 updates of the critic, 0.9 updates old on average" in shown
    assert "3 stale, 2 not finite" in shown or "2 not finite, 3 stale" in shown
    assert "32 bytes per environment step" in shown
