"""From a corpus to text: several nodes shard it, members train the paths, and commands use them."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest

from atoll.data.assignment import read_assignment
from tests.e2e.conftest import Atoll, ticket_of, until, wait_for
from tests.e2e.swarm.test_runs import answers
from tests.patience import PATIENCE_S

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(os.name != "posix", reason="kill -9 is a signal of POSIX"),
]

JOB = """
[job]
name = "modular"
nodes = 2
[model]
name = "gpt"
layers = 2
width = 16
heads = 2
context = 64
[data]
corpus = "files:{folder}/text/*/*.txt"
tokenizer = "bpe:300"
[train]
steps = 20
batch = 4
[strategy]
preset = "dipaco"
every = 10
[dipaco]
modules = [2]
assignment = "{assignment}"
"""
SHARD = ("--modules", "2", "--copies", "1", "--longest", "200", "--reader-steps", "5")


def job_of(atoll: Atoll, assignment: str = "") -> Path:
    draw = random.Random(1)
    for kind, letters in {"words": "abcde ", "sums": "01234+"}.items():
        folder = atoll.folder / "text" / kind
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(20):
            (folder / f"{number}.txt").write_text("".join(draw.choices(letters, k=900)))
    file = atoll.folder / f"job{len(assignment)}.toml"
    file.write_text(JOB.format(folder=atoll.folder, assignment=assignment))
    return file


@pytest.mark.long("tests/cli/commands/test_paths.py::test_a_corpus_is_sharded_by_its_kinds")
def test_a_corpus_becomes_paths_that_write(atoll: Atoll) -> None:
    alone = atoll.folder / "alone" / "paths.safetensors"
    job = str(job_of(atoll))
    done = atoll.run("paths", "shard", job, *SHARD, "--out", str(alone))
    assert done.code == 0, done.both
    known = atoll.hub("--port", "0")
    with known.client() as client:
        until(lambda: answers(client))
        atoll.join(ticket_of(known), name="n0", slots=2)
        until(client.nodes)
        sharing = atoll.start("paths", "shard", job, *SHARD, "-n", "2")
        atoll.worker("w1").kill()
        done = sharing.wait(timeout_s=2 * PATIENCE_S)
        assert done.code == 0, done.both
        (made,) = atoll.runs.glob("*/paths.safetensors")
        assert np.array_equal(read_assignment(made).paths, read_assignment(alone).paths)
        assert (made.parent / "paths.router.safetensors").is_file()
        given = made.parent.rename(atoll.folder / "shards")
        file = given / made.name
        running = atoll.run("run", str(job_of(atoll, f"shards/{made.name}")), "--detach")
        assert running.code == 0, running.both
        file.unlink()  # the job has it
        name = next(job["job"] for job in client.jobs() if job["job"].startswith("modular"))
        view = wait_for(client, name, "done", "failed")
        assert view["state"] == "done", view
        counts = [len(read_assignment(alone).documents(path)) for path in range(2)]
        assert [path["documents"] for path in view["paths"]["paths"]] == counts
        shown = atoll.run("status", name)
        assert "best at" in shown.out, shown.both
    done = atoll.run("collect", name, "--to", str(atoll.folder / "out"))
    run = atoll.folder / "out"
    files = {file.name for file in run.rglob("*.safetensors")}
    paths = {"path-0000.safetensors", "path-0001.safetensors"}
    assert paths | {"router.safetensors", "features.safetensors"} <= files, done.both
    home = next(run.rglob("router.safetensors")).parent
    done = atoll.run("generate", "--paths", str(home), "-p", "12+30", "-n", "5", "--device", "cpu")
    assert done.code == 0, done.both
    assert " of 2" in done.err
    done = atoll.run("paths", "evaluate", str(home), "--every", "16", "--device", "cpu")
    assert done.code == 0, done.both
    assert "every 16" in done.out


def test_a_missing_assignment_is_refused_at_once(atoll: Atoll) -> None:
    done = atoll.run("run", str(job_of(atoll, "nowhere.safetensors")), "--local", "1")
    assert done.code != 0
    assert "not assigned to paths" in done.err
