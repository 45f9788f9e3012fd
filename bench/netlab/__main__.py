"""`python -m bench.netlab`: make, use and remove network labs by hand, as root."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys

from atoll.errors import AtollError
from atoll.netlab import registry
from atoll.netlab.commands import LabError
from atoll.netlab.lab import Lab


def main(arguments: list[str]) -> int:
    """Do what one command line says; return the exit status."""
    given = _parser().parse_args(arguments)
    try:
        return int(given.verb(given))
    except AtollError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.netlab", description=__doc__)
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    verbs.add_parser("probe", help="say whether this machine can").set_defaults(verb=_probe)

    up = verbs.add_parser("up", help="make a lab and leave it up")
    up.add_argument("--hosts", type=int, default=2)
    for option, meaning in (
        ("rate", "both directions, e.g. 20mbit"),
        ("up", "upload, if it is another"),
        ("down", "download, if it is another"),
        ("rtt", "round trip, e.g. 60ms"),
        ("jitter", "how far a round trip may be off"),
        ("loss", "share of packets lost each way, e.g. 0.5%%"),
        ("queue", "buffer in front of each rate, e.g. 200ms"),
        ("name", "of the lab"),
    ):
        up.add_argument(f"--{option}", default="", help=meaning)
    up.set_defaults(verb=_up)

    exec_ = verbs.add_parser("exec", help="run a command inside a host: exec 0 -- COMMAND")
    exec_.add_argument("host", type=int)
    exec_.add_argument("command", nargs="+")
    exec_.set_defaults(verb=_exec)

    for name, verb, meaning in (
        ("cut", _cut, "pull a host's cable"),
        ("heal", _heal, "plug it in again"),
    ):
        cable = verbs.add_parser(name, help=meaning)
        cable.add_argument("host", type=int)
        cable.set_defaults(verb=verb)
    verbs.add_parser("stats", help="totals of all hosts, as JSON").set_defaults(verb=_stats)

    down = verbs.add_parser("down", help="remove a lab and end what runs in it")
    down.add_argument("--all", action="store_true", help="every lab of this machine")
    down.set_defaults(verb=_down)
    for name in ("exec", "cut", "heal", "stats", "down"):
        verbs.choices[name].add_argument("--name", default="", help="if several labs are up")
    return parser


def _probe(_given: argparse.Namespace) -> int:
    reason = Lab.unavailable()
    sys.stdout.write(f"no: {reason}\n" if reason else "yes: labs can be made here\n")
    return 1 if reason else 0


def _up(given: argparse.Namespace) -> int:
    fields = ("hosts", "rate", "up", "down", "rtt", "jitter", "loss", "queue", "name")
    lab = Lab(**{field: getattr(given, field) for field in fields})
    lab.start(guarded=False)
    hosts = ", ".join(f"h{host} {lab.address(host)}" for host in range(len(lab)))
    sys.stdout.write(f"lab {lab.name} is up: {hosts}\n")
    return 0


def _exec(given: argparse.Namespace) -> int:
    command = _lab(given).argv(given.host, given.command)
    os.execvp(command[0], command)


def _cut(given: argparse.Namespace) -> int:
    _lab(given).cut(given.host)
    return 0


def _heal(given: argparse.Namespace) -> int:
    _lab(given).heal(given.host)
    return 0


def _stats(given: argparse.Namespace) -> int:
    totals = [dataclasses.asdict(host) for host in _lab(given).stats()]
    sys.stdout.write(json.dumps(totals, indent=1) + "\n")
    return 0


def _down(given: argparse.Namespace) -> int:
    names = registry.all_labs() if given.all else [given.name or _only_lab()]
    for name in names:
        registry.remove(name)
    return 0


def _lab(given: argparse.Namespace) -> Lab:
    return Lab.attach(given.name or _only_lab())


def _only_lab() -> str:
    """Return the name of the one lab that is up."""
    names = registry.all_labs()
    if len(names) != 1:
        raise LabError(
            "it is not clear which lab is meant",
            given=f"{len(names)} are up: {', '.join(names)}" if names else "none is up",
            remedy="say --name NAME" if names else "python -m bench.netlab up",
        )
    return names[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
