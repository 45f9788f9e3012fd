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
import sys
from typing import Any

from bench.island.kinds import KINDS
from bench.island.rank import compare
from bench.kit.ranks import on_ranks
from bench.kit.report import emit


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
            pairs, segment_s = (3, 0.4) if quick else (11, 1.0)
            rows.append(on_ranks(compare, kind, pairs, segment_s, ranks=kind.ranks)[0])
    shown = ("inner", "mesh", "ratio", "atoll_tokens_per_s", "bare_tokens_per_s", "bubble",
             "bubble_expected")  # fmt: skip
    emit({"rows": rows}, [{name: row[name] for name in shown} for row in rows])


if __name__ == "__main__":
    main()
