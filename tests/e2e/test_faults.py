"""Jobs that do not go well: each ends as it should, with a message that says which node and why."""

from __future__ import annotations

import json

import psutil
import pytest

from tests.e2e.conftest import Atoll, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(90)]


STEPS = 1200


def test_killed_worker_leaves_the_mean_over_those_present(atoll: Atoll) -> None:
    job = atoll.job(steps=STEPS, every=10)  # long enough to be still at it when one is killed
    running = atoll.start("run", str(job), "--local", "3")
    folder = until(
        lambda: atoll.runs.exists() and [p for p in atoll.runs.iterdir() if p.name[0] != "."]
    )[0]
    metrics = folder / "metrics.jsonl"
    until(lambda: metrics.exists() and '"contributors":3' in metrics.read_text().replace(" ", ""))
    victim = next(p for p in atoll.workers() if p.environ()["ATOLL_MEMBER"] == "w1")
    victim.kill()
    done = running.wait()
    assert done.code == 0, done.both
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rounds = {
        r["round"]: r["values"]["contributors"] for r in rows if "contributors" in r["values"]
    }
    assert rounds[min(rounds)] == 3
    assert rounds[max(rounds)] == 2
    assert set(rounds.values()) == {3, 2}
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["replicas_identical"] is True
    assert summary["steps"] == STEPS
    assert "w1" in done.out, "the loss of a member is told"
    assert not atoll.processes()


def test_script_that_raises_shows_its_traceback_and_its_node(atoll: Atoll) -> None:
    (atoll.folder / "train.py").write_text(
        "import atoll\nwith atoll.join() as run:\n    raise ValueError('boom on purpose')\n"
    )
    done = atoll.run("run", "train.py", "--local", "2")
    assert done.code == 1
    assert "raised ValueError: boom on purpose" in done.err
    assert "Traceback (most recent call last)" in done.both
    assert "on node node" in done.err
    later = atoll.run("logs", str(atoll.job_folder()))
    assert "boom on purpose" in later.out, "the hub is gone, the lines are not"
    assert not atoll.processes()


def test_loss_that_is_not_finite_names_member_and_step_and_is_never_averaged(atoll: Atoll) -> None:
    done = atoll.run("run", str(atoll.job(lr="1e9", steps=200)), "--local", "2")
    assert done.code == 1, done.both
    assert "finite" in done.err
    assert "step" in done.err
    assert "w0" in done.err or "w1" in done.err
    rows = (atoll.job_folder() / "metrics.jsonl").read_text()
    assert "NaN" not in rows


def test_worker_that_runs_out_of_memory_is_named_so(atoll: Atoll) -> None:
    (atoll.folder / "train.py").write_text("x = bytearray(10**18)\n")
    done = atoll.run("run", "train.py", "--local", "1")
    assert done.code == 1
    assert "out of memory" in done.err


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "empty"), ("too short", "too small"), (None, "match")],
)
def test_missing_empty_or_small_text_is_refused(atoll: Atoll, text: str | None, words: str) -> None:
    job = atoll.job()
    source = atoll.folder / "text.txt"
    if text is None:
        source.unlink()
    else:
        source.write_text(text)
    done = atoll.run("run", str(job), "--local", "1")
    assert done.code == 1, done.both
    assert "DataError" not in done.err.splitlines()[-1]
    assert words in done.err, done.err


def test_all_workers_killed_fails_the_job_and_says_so(atoll: Atoll) -> None:
    running = atoll.start("run", str(atoll.job(steps=20_000, every=100)), "--local", "2")
    workers = until(lambda: len(w := atoll.workers()) == 2 and w)
    for worker in workers:
        try:
            worker.kill()
        except psutil.NoSuchProcess:
            continue
    done = running.wait()
    assert done.code == 1
    assert "SIGKILL" in done.err
    assert not atoll.processes()
