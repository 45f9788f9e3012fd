"""Summary and report of a job of policies, from what its members left."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest

from atoll.config import JobSpec, parse_spec
from atoll.train.report.report import write_report
from atoll.train.report.rl import MAX_GIF_BYTES, number, rise, rl_charts
from atoll.train.results.rl_summary import curve
from atoll.train.results.summary import summarise, write_summary

GIF = b"GIF89a not really"


def spec(*envs: str, algorithm: str = "ppo", actors: int = 1) -> JobSpec:
    policies = "".join(
        f'[[rl.policies]]\nname = "p{n}"\nenv = "{env}"\nactors = {actors}\n'
        for n, env in enumerate(envs)
    )
    return parse_spec(
        f'[job]\nname = "x"\n[rl]\nsteps = 1000\nalgorithm = "{algorithm}"\n{policies}'
    )


def point(member: str, step: int, **values: float) -> dict[str, Any]:
    return {"time": 100.0 + step, "member": member, "step": step, "round": 0, "values": values}


def lived(member: str, *, low: float, high: float) -> list[dict[str, Any]]:
    return [
        point(
            member, step, env_steps=float(step), env_steps_per_s=50.0, queue_wait_s=step / 100,
            explained_variance=-7.0, **{"return": low + (high - low) * step / 1000},
        )
        for step in range(100, 1001, 100)
    ]  # fmt: skip


def judged(step: int) -> dict[str, Any]:
    return point("w0", step, updates=float(step), **{"value_loss.p0": 0.5, "value_loss.p1": 0.25})


POINTS = [
    *lived("w1", low=0.0, high=100.0), *lived("w2", low=-900.0, high=-100.0),
    *(judged(step) for step in range(5)),
]  # fmt: skip
RESULTS = {
    "w0": {
        "wall_s": 10.0,
        "rl": {
            "role": "critic", "updates": 4, "trajectories": 20, "sent_bytes": 4_000,
            "staleness": {"0": 12, "1": 8}, "dropped": {"stale": 1},
        },
    },
    "w1": {
        "wall_s": 9.0,
        "rl": {
            "role": "actor", "env_steps": 1000, "episodes": 30, "return_first": 5.0,
            "return_last": 95.0, "return_best": 99.0, "updates": 10, "sent_bytes": 30_000,
            "gif": "episodes/p0.gif", "dropped": {"not_finite": 1},
        },
    },
}  # fmt: skip


def summary(of: JobSpec, results: dict[str, Any] = RESULTS) -> dict[str, Any]:
    return summarise(
        job="x-1",
        spec=of,
        results=results,
        points=POINTS,
    )


def test_summary_has_every_policys_latest_figures() -> None:
    rl = summary(spec("CartPole-v1", "Pendulum-v1"))["rl"]
    done, lost = rl["policies"]
    assert (done["finished"], lost["finished"]) == (True, False)
    assert (done["return_first"], done["return_last"], done["return_best"]) == (5.0, 95.0, 99.0)
    # It was lost: what it measured first and last.
    assert (lost["return_first"], lost["return_last"]) == (-820.0, -100.0)
    assert (lost["env_steps"], lost["queue_wait_s"]) == (1000, 10.0)
    assert done["dropped"] == {"stale": 0, "duplicate": 0, "not_finite": 1}
    assert rl["critic_member"]["staleness"] == {"0": 12, "1": 8}
    assert rl["env_steps"] == 2000
    assert rl["env_steps_per_s"] == 200.0
    assert rl["bytes_per_env_step"] == pytest.approx(34_000 / 2000)


def test_cooperative_figures_need_several_members() -> None:
    found = summary(spec("CartPole-v1"))
    assert found["replicas_identical"] is None
    assert found["reduction"] is None
    assert found["tokens"] == 0


def test_actors_of_one_policy_are_added() -> None:
    rl = summary(spec("CartPole-v1", algorithm="impala", actors=2))["rl"]
    (policy,) = rl["policies"]
    assert policy["members"] == ["w1", "w2"]
    assert policy["env_steps"] == 2000
    assert policy["return_last"] == (95.0 - 100.0) / 2
    xs, ys = curve(POINTS, ["w1", "w2"], "return")
    assert xs[-1] == 2000.0
    assert ys[-1] == 0.0  # both of them, at last


def test_own_critics_leave_no_row_and_no_chart_of_a_critic() -> None:
    of = parse_spec(
        '[job]\nname = "x"\n[rl]\ncritic = "own"\n[[rl.policies]]\nname = "p0"\nenv = "A-v0"\n'
    )
    rl = summarise(
        job="x-1", spec=of, results={"w0": RESULTS["w1"]}, points=lived("w0", low=0, high=1),
    )["rl"]  # fmt: skip
    assert rl["critic_member"] is None
    titles = [title for title, *_ in rl_charts(rl, lived("w0", low=0, high=1))]
    assert titles == ["Return", "Explained variance", "Speed", "Waiting"]


def test_returns_that_cannot_be_compared_have_axes_of_their_own() -> None:
    apart = rl_charts(summary(spec("CartPole-v1", "Pendulum-v1"))["rl"], POINTS)
    title, about, traces, look = apart[0]
    assert title == "Return"
    assert "its own scale" in about
    assert len(traces) == 2
    assert look["panels"]
    same = rl_charts(summary(spec("m:cartpole", "other:cartpole"))["rl"], POINTS)
    assert not same[0][3].get("panels")
    explained = next(chart for chart in apart if chart[0] == "Explained variance")
    assert min(explained[2][0]["y"]) == -1.0  # one wild value does not hide all others


def test_report_is_self_contained(tmp_path: Path) -> None:
    lines = "".join(json.dumps(one) + "\n" for one in POINTS)
    (tmp_path / "metrics.jsonl").write_text(lines, encoding="utf-8")
    episodes = tmp_path / "episodes"
    episodes.mkdir()
    (episodes / "p0.gif").write_bytes(GIF)
    (episodes / "p1.gif").write_bytes(GIF + bytes(MAX_GIF_BYTES))
    write_summary(tmp_path, summary(spec("CartPole-v1", "Pendulum-v1")))
    page = write_report(tmp_path).read_text("utf-8")
    assert base64.b64encode(GIF).decode() in page
    assert page.count("data:image/gif") == 1
    assert "src='episodes/p1.gif'" in page  # too large to be put in: it stays beside the report
    assert not re.search(r"(src|href)\s*=\s*['\"]?(http|//)", page)
    for words in ("5.00 \N{RIGHTWARDS ARROW} 95.0", "Staleness", "Loss of the critic", "17 B"):
        assert words in page, words
    assert "held-out" not in page


def test_names_and_texts_cannot_become_markup(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>"
    found = summary(spec("text:brackets"))
    found["rl"]["policies"][0] |= {"policy": evil, "env": evil, "texts": [evil]}
    write_summary(tmp_path, found)
    page = write_report(tmp_path).read_text("utf-8")
    assert "alert(1)</script>" not in page
    assert "Completions" in page


def test_a_gif_outside_the_folder_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret.gif").write_bytes(GIF)
    inside = tmp_path / "run"
    (inside / "episodes").mkdir(parents=True)
    found = summary(spec("CartPole-v1"))
    found["rl"]["policies"][0]["policy"] = "../../secret"
    write_summary(inside, found)
    assert "<img" not in write_report(inside).read_text("utf-8")


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0.5, "0.50"), (-12.34, "-12.3"), (-1234.5, "-1,234")]
)
def test_returns_are_written_with_the_digits_that_tell(value: float | None, text: str) -> None:
    assert number(value) == text
    assert rise({"return_first": value, "return_last": 500.0}) == f"{text} \N{RIGHTWARDS ARROW} 500"
