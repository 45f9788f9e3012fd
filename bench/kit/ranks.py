"""Ranks of one island on this machine: what a function returns on each of them."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from atoll.config.rank_environment import RankPlace

GONE_S = 10.0
"""How long a rank may take to end after the first has answered."""


def on_ranks(
    work: Callable[..., Any], *arguments: Any, ranks: int, longest_s: float = 600.0
) -> list[Any]:
    """Return what `work(place, *arguments)` returns on each rank, in fresh processes.

    They have one thread each; `work` MUST be a module's own function.

    Raises:
        TimeoutError: a rank took longer than `longest_s`.
        EOFError: a rank ended without an answer; its error is on stderr.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    context = multiprocessing.get_context("spawn")
    processes: list[Any] = []
    pipes: list[Connection] = []
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        place = RankPlace(rank, ranks, rank, "127.0.0.1", port)
        processes.append(
            context.Process(target=_be, args=(theirs, work, place, arguments), daemon=True)
        )
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        found = []
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(longest_s):
                raise TimeoutError(f"rank {rank} took longer than {longest_s:.0f} s")
            found.append(pipe.recv())
        return found
    finally:
        for process in processes:
            process.join(GONE_S)
            process.kill()


def _be(
    pipe: Connection, work: Callable[..., Any], place: RankPlace, arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    pipe.send(work(place, *arguments))
