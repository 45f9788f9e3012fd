"""Atoll beside others on the same work and links: `python -m bench.peers [--quick]`, as root.

Four hosts, each a network namespace of its own with one training process, on as many cores as the
machine has: a byte-level GPT of 3.2 million parameters, AdamW, texts of two kinds dealt unevenly,
150 steps and a round every 50 (`bench/peers/setting.py`). A fifth host, with a fast link, has what
a system keeps in one place: the hub, or torchft's lighthouse. Members begin together once all are
connected. The last line of stdout is JSON with a row per system and link:

    seconds             from the beginning until the last member has its last parameters
    utilisation         seconds of members that do not communicate, divided by these; they run at
                        the beginning and at the end of every link, and the mean of both counts
    mb_per_host         sent by a member's host, headers included
    loss                held-out, of the mean of the members' last parameters, the same text for all
    stall_after_kill_s  in a further run (H = 20) the last member is killed (-9) after 70 of 110
                        steps: the longest gap between a survivor's steps after that, minus the
                        longest before, first round left out. Below 0: shorter than a normal round
    identical           whether all ended with the same parameters, bit for bit
    stood_s             how long members did no step: gaps beyond twice the median one, all together
    cpu_s               processor seconds of a member's training process, mean; not those of others
                        that it started (hivemind has such), of nodes and of the hub
    machine_s           processor seconds of all that ran on the machine, the kernel's work included
    load                programs that wanted to run in the last minute, others' included
    note                why something is null

Rivals are imported from here, or from environments below --rivals, where they are installed first.
Only rows of one run may be compared.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import torch

from atoll.netlab.lab import Lab
from bench.kit.report import emit
from bench.peers import rivals
from bench.peers.hosts import LINKS, lab_hosts, parsed
from bench.peers.setting import Setting
from bench.peers.systems import ALONE, RIVALS, SYSTEMS
from bench.peers.table import FIGURES, Plan, Row, compare, measure_link, say, stand


def plan_of(given: argparse.Namespace) -> Plan:
    """Return what the command line asks for."""
    only = given.only or SYSTEMS
    systems = [name for name in SYSTEMS if name in only or name == ALONE]
    if given.quick:
        return Plan(Setting(steps=30, every=10), systems, given.link or LINKS[1:2])
    kills = LINKS[1:2] if given.kill is None else given.kill
    return Plan(Setting(), systems, given.link or LINKS, () if "none" in kills else kills)


def measure_all(plan: Plan, folder: Path | None, rows: list[Row]) -> None:
    """Add a row for every system on every link."""
    wanted = {name: package for name, package in RIVALS.items() if name in plan.systems}
    found = {name: rivals.find(package, folder) for name, package in wanted.items()}
    for link in plan.links:
        members = plan.setting.members
        with lab_hosts(link, members) as hosts, stand(hosts, members) as place:
            for row in measure_link(plan, link, place, found):
                rows.append(row)
                compare(rows)
                say(f"{link}, {row['system']}: {row}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true", help="30 steps on one link, no member killed"
    )
    parser.add_argument("--rivals", type=Path, help="folder of their environments, e.g. ~/rivals")
    parser.add_argument("--only", action="append", choices=SYSTEMS, help="systems to measure")
    parser.add_argument("--link", action="append", type=_link, help=f"default: {', '.join(LINKS)}")
    parser.add_argument(
        "--kill", action="append", type=_link,
        help=f"links on which a member is killed, or none (default: {LINKS[1]})",
    )  # fmt: skip
    given = parser.parse_args()
    if reason := Lab.unavailable():
        say(f"skipped, no network lab here: {reason}")
        return 1
    # Members are many processes: what they load is compiled once, whatever the shell says.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    plan, rows = plan_of(given), list[Row]()
    began, interrupted = time.monotonic(), False
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        measure_all(plan, given.rivals, rows)
    except KeyboardInterrupt:
        interrupted = True
    parameters = sum(each.numel() for each in plan.setting.make_model().parameters())
    result = {
        "rows": rows, "parameters": parameters, "members": plan.setting.members,
        "interrupted": interrupted, "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip
    emit(result, [printed(row) for row in rows])
    return 130 if interrupted else 0


def printed(row: Row) -> Row:
    """Return a row for people: what was not measured is empty."""
    return {name: "" if row[name] is None else row[name] for name in FIGURES}


def _link(text: str) -> str:
    if text != "none":
        try:
            parsed(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return text


if __name__ == "__main__":
    sys.exit(main())
