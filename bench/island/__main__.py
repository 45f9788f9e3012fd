"""What an island's step costs: `python -m bench.island [--quick]`, one JSON object on stdout.

Every kind of parallelism inside an island, against the same step written by hand with torch's own
recipe of that kind: the same model, batch, optimizer and clipping in the same processes, segments
of both taking turns. `ratio` is the median over pairs of Atoll's tokens per second divided by those
by hand. Ranks are processes with one thread each. For pipelines `bubble` is the measured share of a
step in which a rank has nothing to do, `bubble_expected` the closed form of its schedule, and
`bubble_played` what that schedule comes to with the times that were measured for each stage.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import sys
from typing import Any

from atoll.config.rank_environment import RankPlace
from bench.island.kinds import KINDS, Kind
from bench.island.rank import main as rank_main
from bench.kit.report import emit

LONGEST_S = 600.0


def run(kind: Kind, *, pairs: int, segment_s: float) -> dict[str, Any]:
    """Return the row of one kind, measured in fresh processes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    context = multiprocessing.get_context("spawn")
    processes: list[Any] = []
    pipes: list[Any] = []
    for rank in range(kind.ranks):
        ours, theirs = context.Pipe()
        place = RankPlace(rank, kind.ranks, rank, "127.0.0.1", port)
        arguments = (theirs, kind, place, pairs, segment_s)
        processes.append(context.Process(target=rank_main, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        if not pipes[0].poll(LONGEST_S):
            raise TimeoutError(f"{kind.name} took longer than {LONGEST_S:.0f} s")
        row: dict[str, Any] = pipes[0].recv()
        return row
    finally:
        for process in processes:
            process.join(10.0)
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter segments")
    parser.add_argument("--only", default="", help="kinds whose names contain this")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for kind in KINDS:
        if arguments.only in kind.name:
            sys.stderr.write(f"{kind.name} ...\n")
            quick = arguments.quick
            rows.append(run(kind, pairs=3 if quick else 11, segment_s=0.4 if quick else 1.0))
    shown = ("inner", "mesh", "ratio", "atoll_tokens_per_s", "bare_tokens_per_s", "bubble",
             "bubble_expected")  # fmt: skip
    emit({"rows": rows}, [{name: row[name] for name in shown} for row in rows])


if __name__ == "__main__":
    main()
