"""Fleets from TOML files, with precise errors, and files from fleets."""

from __future__ import annotations

import dataclasses
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from atoll.config import read_table
from atoll.config.writing import toml_value
from atoll.errors import ConfigError, unknown
from atoll.fleet.faults import Fault, check_faults
from atoll.fleet.fleet import Fleet, HubLine, Link, Machine, Site

T = TypeVar("T")

TABLES = {"machines": Machine, "sites": Site, "links": Link, "faults": Fault}
REQUIRED = ("name", "between", "what", "machine")
LEAST_STEP_S, MOST_LATENCY_MS = 1e-6, 60_000.0
"""Figures beyond these are mistakes; a simulation of them would not end."""
MOST_MACHINES = 100_000

EXAMPLE = '[[machines]]\nname = "desk"\ngflops = 200\nup_mbps = 20\ndown_mbps = 100\n'


def read_fleet(path: Path) -> Fleet:
    """Return the fleet of a file.

    Raises:
        ConfigError: the file cannot be read, a key or a value is wrong, machines have the same
            name, or links contradict each other or lead to machines that do not exist.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "a file of machines cannot be read", given=f"{path} ({error})",
            expected="a UTF-8 text file with [[machines]]",
        ) from error  # fmt: skip
    return parse_fleet(text, name=path.name)


def parse_fleet(text: str, *, name: str = "the file of machines") -> Fleet:
    """Return the fleet of a text; raises ConfigError as `read_fleet`."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} is not valid TOML", given=str(error)) from error
    for key in tables:
        if key not in (*TABLES, "hub"):
            raise unknown(f"table in {name}", key, (*TABLES, "hub"))
    machines = tuple(_apart(_rows(tables, "machines", Machine)))
    if not machines:
        raise ConfigError(
            f"{name} has no machines", expected=f"at least one, e.g.\n{EXAMPLE}",
            remedy="write it from what a hub knows: atoll plan fleet > fleet.toml",
        )  # fmt: skip
    hub = tables.get("hub", {})
    if not isinstance(hub, Mapping):
        raise ConfigError("[hub] is not a table", given=repr(hub))
    fleet = Fleet(
        machines=machines,
        sites=tuple(_rows(tables, "sites", Site)),
        links=tuple(_rows(tables, "links", Link)),
        faults=tuple(_rows(tables, "faults", Fault)),
        hub=read_table(HubLine, hub, where="[hub]"),
    )
    check_fleet(fleet)
    return dataclasses.replace(fleet, notes=tuple(_notes(fleet)))


def _rows(tables: Mapping[str, Any], key: str, kind: type[T]) -> list[T]:
    rows = tables.get(key, [])
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise ConfigError(
            f"{key} is not a list of tables", given=f"{key} = {rows!r}"[:200],
            expected=f"[[{key}]] above each of them",
        )  # fmt: skip
    found = []
    for number, row in enumerate(rows, 1):
        where = f"[[{key}]] number {number}"
        named = {f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING}  # type: ignore[arg-type]
        required = [name for name in REQUIRED if name in named and name not in row]
        if required:
            raise ConfigError(f"{where} has no {required[0]}", expected=f"{required[0]} = ...")
        found.append(read_table(kind, row, where=where))
    return found


def _apart(machines: Sequence[Machine]) -> Iterator[Machine]:
    """Yield `count` machines for each, with numbered names."""
    if sum(machine.count for machine in machines) > MOST_MACHINES:
        raise ConfigError("too many machines", expected=f"at most {MOST_MACHINES}")
    for machine in machines:
        if machine.count == 1:
            yield machine
            continue
        for number in range(1, machine.count + 1):
            yield dataclasses.replace(machine, name=f"{machine.name}-{number}", count=1)


def check_fleet(fleet: Fleet) -> None:
    """Raise ConfigError for duplicate or unknown names, impossible figures and invalid links."""
    names = Counter(machine.name for machine in fleet.machines)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise ConfigError("two machines have the same name", given=repr(twice[0]))
    sites = {machine.site for machine in fleet.machines} - {""}
    for site in fleet.sites:
        if site.name not in sites:
            raise unknown("site of a machine in [[sites]]", site.name, sites)
    if fleet.hub.machine and fleet.hub.machine not in names:
        raise unknown("machine in [hub]", fleet.hub.machine, names)
    for machine in fleet.machines:
        _check_figures(machine)
    _check_links(fleet, {*names, *sites})
    check_faults(fleet.faults, list(names))


def _check_figures(machine: Machine) -> None:
    """Raise ConfigError for figures that no machine has: mostly another unit was meant."""
    if 0 < machine.step_s < LEAST_STEP_S:
        raise ConfigError(
            f"no machine does a step in the time of {machine.name}",
            given=f"step_s = {machine.step_s:g}", expected=f"seconds, {LEAST_STEP_S:g} or more",
            remedy="atoll plan probe job.toml measures it there",
        )  # fmt: skip
    if machine.latency_ms > MOST_LATENCY_MS:
        raise ConfigError(
            f"no connection has the round trip of {machine.name}",
            given=f"latency_ms = {machine.latency_ms:g}",
            expected=f"milliseconds, at most {MOST_LATENCY_MS:g}",
        )  # fmt: skip


def _check_links(fleet: Fleet, ends: set[str]) -> None:
    known: dict[tuple[str, str], Link] = {}
    for link in fleet.links:
        if len(link.between) != 2:
            raise ConfigError(
                "a link has two ends", given=f"between = {link.between}",
                expected='between = ["desk", "attic"]',
            )  # fmt: skip
        for end in link.between:
            if end not in ends:
                raise unknown("end of a link", end, ends)
        if link.ends[0] == link.ends[1]:
            raise ConfigError(
                "a link leads from a machine to itself", given=f"between = {link.between}",
                expected="two machines or two sites; the network inside a site is in [[sites]]",
            )  # fmt: skip
        before = known.setdefault(link.ends, link)
        if before != link:
            raise ConfigError(
                "two links between the same ends contradict each other",
                given=f"{' -> '.join(link.ends)}: {before.mbps:g} and {link.mbps:g} Mbit/s, "
                f"{before.latency_ms:g} and {link.latency_ms:g} ms",
                expected="one measurement of each direction",
                remedy="leave the older one out",
            )  # fmt: skip


def _notes(fleet: Fleet) -> Iterator[str]:
    """Yield what the file does not say."""
    for what, names in unmeasured(fleet).items():
        yield f"{what} of {', '.join(names[:4])}{' ...' if len(names) > 4 else ''} is not known"
    rated = [m for m in fleet.machines if m.up_mbps and m.name != fleet.hub.machine]
    far = [m.name for m in rated if not m.latency_ms]
    if far:
        listed = f"{', '.join(far[:4])}{' ...' if len(far) > 4 else ''}"
        yield f"the round trip of {listed} to the hub is not given: taken as 0"
    if rated and not all(fleet.hub_rates_mbps):
        yield "the hub's own line is not given in [hub]: it does not limit"


def unmeasured(fleet: Fleet) -> dict[str, list[str]]:
    """Return which figures are missing, with the machines."""
    found: dict[str, list[str]] = {}
    for machine in fleet.machines:
        if not (machine.step_s or machine.gflops):
            found.setdefault("the speed", []).append(machine.name)
        if not (machine.up_mbps and machine.down_mbps) and machine.name != fleet.hub.machine:
            found.setdefault("the line to the hub", []).append(machine.name)
        if not machine.memory_gb:
            found.setdefault("the memory", []).append(machine.name)
    return found


def dump_fleet(fleet: Fleet) -> str:
    """Return the TOML text of a fleet; figures that are not known are left out."""
    lines = [f"# {note}" for note in fleet.notes]
    if fleet.hub != HubLine():
        lines += ["[hub]", *_pairs(fleet.hub), ""]
    for key, rows in (
        ("machines", fleet.machines), ("sites", fleet.sites), ("links", fleet.links),
        ("faults", fleet.faults),
    ):  # fmt: skip
        for row in rows:
            lines += [f"[[{key}]]", *_pairs(row), ""]
    return "\n".join(lines)


def _pairs(row: Any) -> Iterator[str]:
    for field in dataclasses.fields(row):
        value = getattr(row, field.name)
        if value == field.default or field.name == "count":
            continue
        if isinstance(value, str | list):
            yield f"{field.name} = {toml_value(value)}"
        else:
            yield f"{field.name} = {value:.6g}"
