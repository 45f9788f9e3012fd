"""A script's data when a process is killed: each sample once, besides those of lost steps."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.conftest import Atoll, until

pytestmark = pytest.mark.e2e

SAMPLES, BATCH, EVERY = 600, 5, 5

SCRIPT = f"""
import os, pathlib, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import atoll

with atoll.join() as run:
    model = nn.Linear(1, 1)
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = run.wrap(model, inner, outer=atoll.DiLoCo(every={EVERY}))
    rows = torch.arange({SAMPLES}, dtype=torch.float32)[:, None]
    loader = DataLoader(TensorDataset(rows), batch_size={BATCH}, shuffle=True)
    log_file = pathlib.Path(sys.argv[1]) / f"{{run.member}}-{{os.getpid()}}"
    for (x,) in run.shard(loader):
        with log_file.open("a") as file:
            print(*x[:, 0].int().tolist(), file=file)
        loss = model(x / {SAMPLES}).square().mean()
        optimizer.zero_grad()
        loss.backward()
        run.log(loss=loss, tokens=len(x))
        optimizer.step()
        time.sleep(0.05)
"""


@pytest.mark.long("tests/loops/test_loops.py::test_the_share_of_a_lost_member_is_trained_on_once")
def test_a_killed_process_costs_no_sample(atoll: Atoll) -> None:
    script, log_folder = atoll.folder / "train.py", atoll.folder / "given"
    script.write_text(SCRIPT)
    log_folder.mkdir()
    running = atoll.start("run", str(script), "--local", "2", "--", str(log_folder))

    def late_enough() -> Path | None:
        found = list(log_folder.glob("w1-*"))
        return found[0] if found and len(found[0].read_text().splitlines()) > 4.5 * EVERY else None

    def measured() -> int:
        """Return the steps of the victim that the hub knows of."""
        files = list(atoll.runs.glob("*/metrics.jsonl"))
        lines = files[0].read_text().splitlines(keepends=True) if files else []
        points = [json.loads(line) for line in lines if line.endswith("\n")]
        return max((p["step"] for p in points if p["member"] == "w1"), default=0)

    victim: Path = until(late_enough)
    known = until(measured)
    os.kill(int(victim.name.partition("-")[2]), signal.SIGKILL)
    done = running.wait()
    assert done.code == 0, done.both
    counts: Counter[int] = Counter()
    for path in log_folder.iterdir():
        counts.update(map(int, path.read_text().split()))
    last = [int(n) for line in victim.read_text().splitlines()[-EVERY - 1 :] for n in line.split()]
    assert set(counts) == set(range(SAMPLES))
    assert {n for n, count in counts.items() if count > 1} <= set(last)
    summary = json.loads((atoll.job_folder() / "summary.json").read_text())
    data = summary["data"]
    # Less only if a member is so late for the last round that the others end without it.
    assert data["committed"] + data["missed"] == SAMPLES
    assert data["missed"] <= EVERY * BATCH
    assert data["given"] >= data["committed"]
    others = [path for path in log_folder.iterdir() if path != victim]
    without = sum(len(path.read_text().split()) for path in others)
    assert summary["tokens"] >= without + known * BATCH, "what the killed one did counts"
