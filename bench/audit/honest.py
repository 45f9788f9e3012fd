"""Honest member-rounds that are all computed again: no member may be accused."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from bench.audit.simulation import MEMBERS, Simulation, job

HONEST_ROUNDS = 125
"""Rounds of one honest run: 1,000 member-rounds of eight."""


def honest(*, member_rounds: int, processes: int) -> dict[str, int]:
    """Return the strikes in so many honest member-rounds that are all computed again.

    Runs of `HONEST_ROUNDS` rounds, each with its own data and draws, `processes` of them
    at a time.
    """
    left = member_rounds // MEMBERS
    work: list[tuple[int, int]] = []
    while left > 0:
        work.append((min(left, HONEST_ROUNDS), 2 + len(work)))
        left -= HONEST_ROUNDS
    found = dict.fromkeys(("member_rounds", "checked", "strikes"), 0)
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for one in pool.map(honest_run, work):
            found = {name: value + one[name] for name, value in found.items()}
            sys.stderr.write(json.dumps(found) + "\n")
            sys.stderr.flush()
    return found


def honest_run(work: tuple[int, int]) -> dict[str, int]:
    """Return the counts of one honest run; `work`: its rounds and its seed."""
    rounds, seed = work
    torch.set_num_threads(1)
    with Simulation(job(every=2, rounds=rounds, width=16, batch=2, seed=seed)) as simulation:
        found = simulation.run(rounds, share=1.0, seed=seed, looked_at=False)
    return {
        "member_rounds": found.member_rounds, "checked": found.checked,
        "strikes": sum(map(len, found.struck.values())),
    }  # fmt: skip
