"""Attacks on real hubs, nodes and jobs: `python -m bench.attack --minutes 10`; `--quick`.

A hub with TLS on an address of this machine, nodes, and a job that trains all the time. Every
attack tries to break one promise of the documentation, by the public protocol only, with what its
role has: nothing, a ticket, a token, a node, a member of the job. Then the decoders are fuzzed. The
last line of stdout is JSON; the exit status is 1 when a promise is broken or an attack failed.

    held, broken, not_tried, failed    how many attacks had this end
    not_fuzzed                         decoders whose process did not start: they say nothing
    rows                               of each: attack, promise, verdict, what was seen, seconds
    fuzz                               of each decoder: executions, per second, crashes
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.attack import (
    apart,
    clocks,
    donors,
    files,
    lines,
    members,
    network,
    owners,
    people,
    stores,
    strangers,
)
from bench.attack.attacks import Attack, Row, Verdict
from bench.attack.fuzz import Found, fuzz_all, has_atheris
from bench.attack.site import HONEST, Site
from bench.kit.cluster import Cluster
from bench.kit.report import emit

QUICK_FUZZ_S = 20.0
"""Of all decoders together, with `--quick`."""

SUITES = (
    members, donors, clocks, stores, owners, files, network, people, lines, apart, strangers,
)  # fmt: skip
"""In an order: `lines` and `apart` start machines, which would run what before them has to wait,
and `strangers` use up the joins of an address."""


def chosen(*, quick: bool, only: str) -> list[Attack]:
    """Return the attacks to try."""
    return [
        attack
        for module in SUITES
        for attack in module.suite
        if (attack.quick or not quick) and only in f"{module.__name__}: {attack.name}"
    ]


def attack(folder: Path, attacks: list[Attack]) -> list[Row]:
    """Carry the attacks out and return the verdicts."""
    address = strangers.far_address()
    options = ("--host", "0.0.0.0", "--advertise", address, "--tls", "on")
    with Cluster(folder / "cluster", hub_options=options) as cluster:
        cluster.start_hub()
        site = Site(cluster, folder / "attacker")
        site.lend()
        site.train()
        rows = []
        for one in attacks:
            rows.append(_reported(one.tried(site)))
        wrong = site.end()
        end = "the job under attack ends well"
        verdict: Verdict = "broken" if wrong else "held"
        seen = wrong or f"{len(HONEST)} members or more with one digest"
        return [*rows, _reported(Row(end, members.NAMED, verdict, seen, 0.0))]


def _reported(row: Row) -> Row:
    """Write a row to stderr as soon as it is known."""
    sys.stderr.write(f"{row.verdict:9} {row.seconds:6.1f} s  {row.attack}: {row.seen}\n")
    return row


def main() -> int:
    """Attack, and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.attack", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the quick attacks, seconds of fuzz")
    parser.add_argument("--only", default="", help="attacks with these words in their name")
    parser.add_argument("--minutes", type=float, default=10.0, help="of fuzzing, all decoders")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = attack(Path(folder), chosen(quick=given.quick, only=given.only))
    fuzzed = fuzz(given.minutes * 60 if not given.quick else QUICK_FUZZ_S) if not given.only else []
    counts = {name: sum(row.verdict == name for row in rows) for name in _VERDICTS}
    result: dict[str, Any] = {name.replace(" ", "_"): count for name, count in counts.items()}
    result["rows"] = [
        {**{name: getattr(row, name) for name in _COLUMNS}, "seconds": round(row.seconds, 1)}
        for row in rows
    ]
    result |= {
        "fuzz": [{**asdict(one), "per_s": round(one.per_second)} for one in fuzzed],
        "executions_per_s": round(
            sum(one.executions for one in fuzzed) / max(sum(one.seconds for one in fuzzed), 1.0)
        ),
        "hours_fuzzed": round(sum(one.seconds for one in fuzzed) / 3600, 3),
        "crashes": sum(len(one.crashes) for one in fuzzed),
        "not_fuzzed": sum(bool(one.not_fuzzed) for one in fuzzed),
    }
    emit(result, [{name: getattr(row, name) for name in _COLUMNS} for row in rows])
    return 1 if counts["broken"] or counts["failed"] or result["crashes"] else 0


def fuzz(seconds: float) -> list[Found]:
    """Fuzz all decoders for so long, together."""
    from bench.attack.decoders import targets

    engine = "atheris" if has_atheris() else "own"
    found = []
    for one in fuzz_all(list(targets()), seconds=seconds, engine=engine):
        sys.stderr.write(
            f"fuzz {one.decoder}: {one.executions} executions, {one.per_second:,.0f} a second, "
            f"{one.kept} inputs kept, {len(one.crashes)} crashes"
            f"{', not fuzzed: ' * bool(one.not_fuzzed)}{one.not_fuzzed}\n"
        )
        for crash in one.crashes:
            sys.stderr.write(f"  {crash['error']}; input in base64: {crash['input'][:400]}\n")
        found.append(one)
    return found


_VERDICTS = ("held", "broken", "not tried", "failed")
_COLUMNS = ("verdict", "attack", "promise", "seen")


if __name__ == "__main__":
    sys.exit(main())
