"""Runs one after the other, or several at a time in processes of their own."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import multiprocessing
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import torch

from atoll.clock import RealClock
from bench.methods.ledger import Ledger, Record
from bench.methods.running import Trial

Work = Callable[[Trial], list[Record]]
Result = list[Record] | Exception


def fill(
    ledger: Ledger, trials: Sequence[Trial], work: Work, *, processes: int, deadline: float
) -> None:
    """Run trials that are not in the ledger and keep their records; one that fails is reported."""
    ended = 0
    for trial, done in run_all(trials, work, processes=processes, deadline=deadline):
        ended += 1
        if isinstance(done, Exception):
            sys.stderr.write(f"{trial.name}: FAILED: {type(done).__name__}: {done}\n")
            traceback.print_exception(done)
            continue
        for record in done:
            ledger.add(record)
            summary = (
                f"{record['deviation']} from {record['against']}"
                if record["kind"] == "reference"
                else f"{record['loss']:.4f} in {record['seconds']:.0f} s"
            )
            sys.stderr.write(f"{trial.name}: {summary}\n")
    if ended < len(trials):
        sys.stderr.write("time is up; the same command goes on from here\n")


def run_all(
    trials: Sequence[Trial], work: Work, *, processes: int, deadline: float
) -> Iterator[tuple[Trial, Result]]:
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
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(_process()) for _ in range(processes)]
        going: dict[Future[Result], tuple[Trial, ProcessPoolExecutor]] = {}
        while True:
            if clock.monotonic() <= deadline:
                for trial in itertools.islice(waiting, len(idle)):
                    process = idle.pop()
                    going[process.submit(_tried, work, trial)] = trial, process
            if not going:
                return
            ended, _ = concurrent.futures.wait(
                going, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for each in ended:
                trial, process = going.pop(each)
                try:
                    done = each.result()
                except BrokenProcessPool as error:  # it was killed, perhaps for lack of memory
                    done, process = error, stack.enter_context(_process())
                idle.append(process)
                yield trial, done


def _process() -> ProcessPoolExecutor:
    """Return what runs one trial after the other in a process: one that dies takes no other."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(
        1, mp_context=spawn, initializer=torch.set_num_threads, initargs=(1,)
    )


def _tried(work: Work, trial: Trial) -> Result:
    try:
        return work(trial)
    except Exception as error:  # the other rows are wanted all the same
        return error
