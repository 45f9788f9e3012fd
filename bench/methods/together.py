"""Runs one after the other, or several at a time in processes of their own."""

from __future__ import annotations

import concurrent.futures
import itertools
import multiprocessing
from collections.abc import Callable, Iterator, Sequence

import torch

from atoll.clock import RealClock
from bench.methods.ledger import Record
from bench.methods.running import Trial

Work = Callable[[Trial], list[Record]]
Done = tuple[Trial, list[Record] | Exception]


def run_all(
    trials: Sequence[Trial], work: Work, *, processes: int, deadline: float
) -> Iterator[Done]:
    """Yield every trial with its records, or with what ended it, as soon as it has ended.

    Args:
        trials: what to run, most important first.
        work: runs one; for several processes a function of a module.
        processes: how many at a time; 1: in this process.
        deadline: monotonic time after which none begins.
    """
    clock, waiting = RealClock(), iter(trials)
    if processes == 1:
        for trial in waiting:
            if clock.monotonic() > deadline:
                return
            yield trial, _tried(work, trial)
        return
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        processes, mp_context=spawn, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        going: dict[concurrent.futures.Future[list[Record] | Exception], Trial] = {}
        while True:
            if clock.monotonic() <= deadline:
                for trial in itertools.islice(waiting, processes - len(going)):
                    going[pool.submit(_tried, work, trial)] = trial
            if not going:
                return
            ended, _ = concurrent.futures.wait(
                going, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for each in ended:
                yield going.pop(each), each.result()


def _tried(work: Work, trial: Trial) -> list[Record] | Exception:
    try:
        return work(trial)
    except Exception as error:  # the other rows are wanted all the same
        return error
