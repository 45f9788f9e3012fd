"""What simulations say: `python -m bench.simulate`, and beside real processes with `--real`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from atoll.netlab.lab import Lab
from atoll.simulate.world import simulate
from bench.kit.report import emit
from bench.simulate import many, real


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulate", description=f"{many.__doc__}\n{real.__doc__}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--members", type=int, default=10_000)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--every", type=int, default=500)
    parser.add_argument("--quorum", type=float, default=0.9)
    parser.add_argument("--real", action="store_true", help="six processes, and six simulated")
    parser.add_argument("--keep", type=Path, help="with --real: keeps its logs here")
    parser.add_argument(
        "--quick", action="store_true", help="1,000 members, two hours; with --real 90 seconds"
    )
    given = parser.parse_args()
    return beside_real(given) if given.real else ten_thousand(given)


def ten_thousand(given: argparse.Namespace) -> int:
    """Simulate a day with a quorum and without."""
    members, hours = (1_000, 2.0) if given.quick else (given.members, given.hours)
    rows = []
    for quorum in (given.quorum, 0.0):
        setting = many.setting_of(members=members, hours=hours, quorum=quorum, every=given.every)
        rows.append(many.row_of(simulate(setting, many.say(quorum)), quorum))
        sys.stderr.write(f"{rows[-1]}\n")
    first, plain = rows
    emit(
        {
            "goodput": first["goodput"], "plain": plain["goodput"], "members": members,
            "simulated_h": hours, "wall_s": first["wall_s"], "cpu_s": first["cpu_s"],
            "rss_gb": first["rss_gb"],
        },
        rows,
    )  # fmt: skip
    return 0


def beside_real(given: argparse.Namespace) -> int:
    """Run six processes, and simulate them."""
    if reason := Lab.unavailable():
        sys.stderr.write(f"no network lab here: {reason}\n")
        return 1
    seconds = real.QUICK_S if given.quick else real.LENGTH_S
    with tempfile.TemporaryDirectory(prefix="simulate-", ignore_cleanup_errors=True) as made:
        folder = given.keep.resolve() if given.keep else Path(made)
        emit(*real.beside(folder, seconds=seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
