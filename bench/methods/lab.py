"""Wall time of the first rows on real lines: `python -m bench.methods.lab`, as root on Linux.

A hub and four members, each in a network namespace of its own, real processes and sockets, lines of
the rates of the table with 80 ms round trip; the hub's own line has no limit. Rounds go through the
hub (`--route relay`), as in the modelled times, between members (`--route direct`), or whichever is
faster (`--route auto`, the default of jobs). Steps last 30 ms and are slept, for there is one
machine here; every round, codec and byte is the row's. A row that sends in every step and would
take longer than `--longest-s` is cut, and its seconds are those of the steps that it did, times the
steps that it has (`cut`).

wall_s        first step to last parameters, the slowest member
modelled_s    the same by bench/methods/modelled.py, whose bytes are those of the run in memory
sent_bytes    by a member in the steps that were done

Finished rows are appended to `--out`, the ledger of `python -m bench.methods`, and not run again;
`python -m bench.methods.plots` puts them into the table.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from atoll.netlab.lab import Lab
from bench.kit.cluster import ROOT
from bench.kit.report import emit
from bench.methods.ledger import Ledger, Record
from bench.methods.modelled import RATES_BPS, Clock, codec_of_means
from bench.methods.rows import ROWS, Row, named
from bench.methods.setting import FULL
from bench.slowlink import END_S, HUB, Site, lines_of, say, site
from bench.slowlink_member import MEMBERS

FIRST = 10
"""Rows that are measured where none is named."""
JOINING_S = 90.0
SLOWER = 4.0
"""A job is given up when it takes so many times as long as the model says."""


def modelled_s(row: Row, ledger: Ledger, *, rate_bps: float, clock: Clock) -> float:
    """Return the seconds that the model says a row takes.

    Raises:
        SystemExit: the ledger has no run of this row, which knows its exchanges.
    """
    wanted = {"row": row.name, "steps": FULL.steps, "scale": FULL.scale}
    runs = [r for r in ledger.of("run", **wanted) if r["members"] in (MEMBERS, 1)]
    if not runs:
        raise SystemExit(f"{ledger.path} has no run of {row.name!r}: python -m bench.methods first")
    return clock.wall_s(
        runs[0]["exchanges"], steps=FULL.steps, rate_bps=rate_bps, overlap=row.overlap_steps,
        codec=codec_of_means(row.preset, runs[0].get("codec", row.codec)),
    )  # fmt: skip


def steps_of(row: Row, expected_s: float, *, longest_s: float) -> int:
    """Return how many of its steps a row does: all, or what fits, at least ten.

    Only a row that sends the same in every step is cut: of others a part says little of the whole.
    """
    if expected_s <= longest_s or "every" in row.options:
        return FULL.steps
    return max(10, int(FULL.steps * longest_s / (3 * expected_s)))


def measure(
    place: Site, rows: Sequence[tuple[Row, int, float]], *, route: str, step_s: float
) -> Iterator[dict[str, Any]]:
    """Run rows, each for so many steps and expected to take so many seconds, in one job.

    Yields what was seen of a row as soon as every member has ended it: one that does not come, and
    all after it, did not end in time, or lost a member.
    """
    out = place.folder / f"rows-{time.monotonic_ns()}"
    out.mkdir()
    plan = {
        "members": MEMBERS, "step_s": step_s, "rows": [(row.name, n) for row, n, _ in rows],
    }  # fmt: skip
    (out / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    member = ROOT / "bench" / "methods" / "lab_member.py"
    (out / "member.py").write_text(member.read_text(encoding="utf-8"), encoding="utf-8")
    job = out / "job.toml"
    job.write_text(
        f'[job]\nname = "rows"\nscript = "member.py"\nroute = "{route}"\nnodes = {MEMBERS}\n'
        f'args = ["--plan", "{out / "plan.json"}", "--out", "{out}"]\n',
        encoding="utf-8",
    )
    running = place.start(HUB, "run", str(job))
    deadline = time.monotonic() + JOINING_S + SLOWER * sum(expected for *_, expected in rows)
    shown, over = 0, False
    while not over:
        time.sleep(0.2)
        over = running.poll() is not None or time.monotonic() > deadline
        ended = _ended(out)
        yield from ended[shown:]
        shown = len(ended)
    if running.poll() is None:
        place.stop_jobs()
        running.wait(END_S)


def _ended(out: Path) -> list[dict[str, Any]]:
    """Return the rows that all members ended together."""
    own = list(lines_of(out).values())
    if len(own) < MEMBERS:
        return []
    found = []
    for lines in zip(*(lines[1:] for lines in own), strict=False):
        if any(line["contributors"] not in ([], [MEMBERS]) for line in lines):
            break
        found.append(max(lines, key=lambda line: float(line["seconds"])))
    return found


def records(
    ledger: Ledger, rows: Sequence[Row], *, label: str, route: str, longest_s: float, clock: Clock
) -> None:
    """Measure what is not in the ledger yet at one rate, and keep it."""
    rate_bps, wanted = RATES_BPS[label], list[tuple[Row, int, float]]()
    for row in rows:
        if not ledger.of("wall", row=row.name, link=label, route=route):
            expected_s = modelled_s(row, ledger, rate_bps=rate_bps, clock=clock)
            steps = steps_of(row, expected_s, longest_s=longest_s)
            wanted.append((row, steps, expected_s * steps / FULL.steps))
    if not wanted:
        return
    say(f"{label}, {route}: {sum(expected for *_, expected in wanted):.0f} s of rows")
    with site(round(rate_bps / 1e6)) as place:
        for line in measure(place, wanted, route=route, step_s=clock.step_s):
            row = next(row for row, *_ in wanted if row.name == line["row"])
            ledger.add(_record(line, row, ledger, label=label, route=route, clock=clock))
            say(f"  {row.name}: {ledger.records[-1]['wall_s']} s")


def _record(
    line: dict[str, Any], row: Row, ledger: Ledger, *, label: str, route: str, clock: Clock
) -> Record:
    expected_s = modelled_s(row, ledger, rate_bps=RATES_BPS[label], clock=clock)
    return {
        "kind": "wall", "row": row.name, "members": min(MEMBERS, *row.members), "seed": 0,
        "steps": FULL.steps, "scale": FULL.scale, "link": label, "route": route,
        "wall_s": round(line["seconds"] * FULL.steps / line["steps"], 1),
        "modelled_s": round(expected_s, 1), "cut": line["steps"] < FULL.steps,
        "steps_done": line["steps"], "sent_bytes": line["sent_bytes"],
        "load": os.getloadavg()[0],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.methods.lab", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--rows", default="", help=f"names, with commas; the first {FIRST}")
    parser.add_argument("--links", default=",".join(RATES_BPS), help="with commas")
    parser.add_argument("--route", choices=("relay", "direct", "auto"), default="relay")
    parser.add_argument("--longest-s", type=float, default=400.0)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/bench_methods.jsonl"), help="file of finished runs"
    )
    given = parser.parse_args()
    if reason := Lab.unavailable():
        say(f"no network lab here: {reason}")
        return 1
    links = [label.strip() for label in given.links.split(",")]
    if unknown := set(links).difference(RATES_BPS):
        parser.error(f"no link {', '.join(sorted(unknown))}; there are: {', '.join(RATES_BPS)}")
    rows = named(given.rows) if given.rows else list(ROWS[:FIRST])
    ledger, interrupted = Ledger(given.out), False
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for label in links:
            records(
                ledger, rows, label=label, route=given.route, longest_s=given.longest_s,
                clock=Clock(),
            )  # fmt: skip
    except KeyboardInterrupt:
        interrupted = True
    found = ledger.of("wall")
    emit({"rows": found, "interrupted": interrupted}, [
        {name: r[name] for name in ("row", "link", "route", "wall_s", "modelled_s", "cut", "load")}
        for r in found
    ])  # fmt: skip
    return 130 if interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
