"""Runs of the benchmarks of methods: one that fails takes no other, and none begins too late."""

from __future__ import annotations

import math
import os

import pytest

from bench.methods.ledger import Record
from bench.methods.rows import Row
from bench.methods.running import Trial
from bench.methods.setting import Setting
from bench.methods.together import run_all

TINY = Setting(layers=1, width=16, context=16, batch=2, steps=3, held_out_tokens=1_024)
ROW = Row(name="local-sgd", preset="local-sgd")
DIES, FAILS = 1, 2
"""Seeds."""


def work(trial: Trial) -> list[Record]:
    if trial.seed == DIES:
        os._exit(1)
    if trial.seed == FAILS:
        raise ValueError("this one fails")
    return [{"seed": trial.seed}]


def outcomes(*seeds: int, processes: int, deadline: float = math.inf) -> dict[int, str]:
    trials = [Trial(ROW, 2, seed, TINY) for seed in seeds]
    found = run_all(trials, work, processes=processes, deadline=deadline)
    return {trial.seed: type(done).__name__ for trial, done in found}


def test_a_run_that_fails_takes_no_other() -> None:
    assert outcomes(0, FAILS, 3, processes=1) == {0: "list", FAILS: "ValueError", 3: "list"}


def test_no_run_begins_after_the_deadline() -> None:
    assert outcomes(0, 3, processes=1, deadline=-math.inf) == {}
    assert outcomes(0, 3, processes=2, deadline=-math.inf) == {}


@pytest.mark.long("tests/bench/test_together.py::test_a_run_that_fails_takes_no_other")
def test_a_run_whose_process_dies_takes_no_other() -> None:
    found = outcomes(0, DIES, FAILS, 3, 4, processes=2)
    assert found == {
        0: "list", DIES: "BrokenProcessPool", FAILS: "ValueError", 3: "list", 4: "list",
    }  # fmt: skip
