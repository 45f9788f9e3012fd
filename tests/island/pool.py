"""Ranks for tests: processes that stay, and do one function after the other together.

A process that loads torch costs seconds; a function of a test does not. Each is done in a fork of
the process that waits, which never computes itself: torch remembers meshes beyond their group.
What a fork loads is forgotten with it: `tests/warm.py` has loaded it before.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed

from bench.kit.ports import free_port as free_port
from tests.warm import processes

dist: Any = torch.distributed
DEADLINE_S = 240.0
MEETINGS = 3
"""Now and then another program's connection reaches a port of Gloo while ranks connect, and Gloo
gives up."""


def _rank(pipe: Connection) -> None:
    """Do what is asked, in a process group of the ranks asked for, until the pipe ends."""
    os.setsid()
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # fully_shard would, a second of work in every fork
    gc.freeze()  # else every fork copies what collecting garbage looks at
    while True:
        try:
            order = pipe.recv()
        except EOFError:
            os._exit(0)
        child = os.fork()
        if not child:
            _do(pipe, *order)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            os._exit(1)


def _do(pipe: Connection, function: Any, args: Any, rank: int, ranks: int, port: int) -> None:
    """Do one function in a process group of its own, and tell what came of it."""
    faulthandler.dump_traceback_later(0.9 * DEADLINE_S)  # a rank that waits says where
    try:
        # torch replaces its thread pool at its first use after a fork, and two threads that come to
        # that at once find none ("Invalid thread pool!").
        torch.set_num_threads(1)
        torch.manual_seed(0)
        _meet(rank, ranks, port)
        found: Any = function(*args)
        dist.destroy_process_group()
        told = pickle.dumps((True, found))  # by value: this process is gone before it is read
    except BaseException as error:
        told = pickle.dumps((False, (error, traceback.format_exc())))
    faulthandler.cancel_dump_traceback_later()
    pipe.send_bytes(told)
    pipe.recv()  # nobody hangs up while another rank still connects


class NotMet(Exception):
    """The ranks did not connect to each other, so that nothing was done."""


def _meet(rank: int, ranks: int, port: int) -> None:
    try:
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks,
            timeout=timedelta(seconds=60),
        )  # fmt: skip
    except Exception as error:
        raise NotMet(str(error)) from None


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", function))


class Ranks:
    """Up to so many processes; started when they are first needed."""

    def __init__(self) -> None:
        self._processes: list[tuple[Any, Connection]] = []

    def run(self, ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what a module's function returns on each of `ranks` ranks.

        It runs in a default process group (Gloo) of its own. Arguments and results must be
        picklable; tensors should be plain and small.

        Raises:
            BaseException: what it raised on the first rank that failed; its traceback is noted.
        """
        for _ in range(MEETINGS - 1):
            with contextlib.suppress(NotMet):
                return self._run(ranks, function, args)
        return self._run(ranks, function, args)

    def _run(self, ranks: int, function: Callable[..., Any], args: Any) -> list[Any]:
        self._start(ranks)
        port = free_port()
        for rank, (_, pipe) in enumerate(self._processes[:ranks]):
            pipe.send((function, args, rank, ranks, port))
        found: list[Any] = []
        failed: tuple[BaseException, str] | None = None
        for rank, (_, pipe) in enumerate(self._processes[:ranks]):
            if failed is not None and not pipe.poll(5.0):
                continue
            if not pipe.poll(DEADLINE_S):
                self.close()
                raise TimeoutError(f"rank {rank} of {_name(function)} gave no answer")
            try:
                good, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                self.close()
                raise RuntimeError(f"rank {rank} of {_name(function)} died") from None
            if good:
                found.append(value)
            elif failed is None:
                failed = value
        for _, pipe in self._processes[:ranks]:
            pipe.send(None)
        if failed is not None:
            self.close()  # others may still be in a collective
            failed[0].add_note(failed[1])
            raise failed[0]
        return found

    def _start(self, ranks: int) -> None:
        context = processes()
        while len(self._processes) < ranks:
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._processes.append((process, ours))

    def close(self) -> None:
        """End all processes; the next run starts others."""
        processes, self._processes = self._processes, []
        for process, pipe in processes:
            pipe.close()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
        for process, _ in processes:
            process.join(10.0)
