"""When machines are there: failures by chance, owners' hours, or a trace of who was there when."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable, Mapping
from pathlib import Path

from atoll.errors import ConfigError
from atoll.simulate.setting import DAY_S, Absence, Cause, Profile, Setting


def absences(setting: Setting, profile: Profile, member: int) -> list[Absence]:
    """Return when a member's machine is away, in order and without overlap.

    Failures are a Poisson process and repairs exponential; both depend on the seed and the member
    only. An owner lends the same hours every day, from a time of day of the member's own.
    """
    if setting.faults is not None:
        return _apart(sorted((a for who, a in setting.faults if who == member), key=_since))
    if setting.trace:
        return _traced(setting, member)
    chance = random.Random(f"{setting.seed}:{member}:presence")
    closed = list(_closed(setting, profile, chance))
    failed = list(_failed(setting, profile, chance))
    return _apart(sorted(closed + failed, key=_since))


def _since(one: Absence) -> float:
    return one.since_s


def _failed(setting: Setting, profile: Profile, chance: random.Random) -> Iterable[Absence]:
    if not profile.failures_per_s:
        return
    now_s = chance.expovariate(profile.failures_per_s)
    while now_s < setting.duration_s:
        away_s = chance.expovariate(1.0 / setting.repair_s) if setting.repair_s else 0.0
        yield Absence(now_s, now_s + away_s, Cause.FAILED)
        now_s += away_s + chance.expovariate(profile.failures_per_s)


def _closed(setting: Setting, profile: Profile, chance: random.Random) -> Iterable[Absence]:
    if profile.lent_share >= 1:
        return
    start_s, lent_s = chance.random() * DAY_S, profile.lent_share * DAY_S
    day_s = start_s - 2 * DAY_S
    while day_s < setting.duration_s:
        since_s, until_s = day_s + lent_s, day_s + DAY_S
        if until_s > 0:
            yield Absence(max(0.0, since_s), until_s, Cause.CLOSED)
        day_s += DAY_S


def _traced(setting: Setting, member: int) -> list[Absence]:
    here = sorted((since, until) for who, since, until in setting.trace if who == member)
    found, last_s = [], 0.0
    for since_s, until_s in here:
        if since_s > last_s:
            cause = Cause.FAILED if last_s else Cause.CLOSED  # it is not there yet
            found.append(Absence(last_s, since_s, cause))
        last_s = max(last_s, until_s)
    if last_s < setting.duration_s:
        found.append(Absence(last_s, setting.duration_s, Cause.FAILED))
    return found


def _apart(ordered: Iterable[Absence]) -> list[Absence]:
    """Return absences without overlap; the first cause counts."""
    found: list[Absence] = []
    for one in ordered:
        if found and one.since_s < found[-1].until_s:
            last = found[-1]
            if one.until_s > last.until_s:
                found[-1] = Absence(last.since_s, one.until_s, last.cause)
        else:
            found.append(one)
    return found


HEADER = ("member", "from_s", "to_s")


def read_trace(path: Path, *, members: int = 0) -> tuple[tuple[int, float, float], ...]:
    """Return the rows of a CSV `member,from_s,to_s`: who was there when, from the start.

    Members are whole numbers or names, which are numbered in order of appearance. With `members`
    above those of the file its rows are repeated for the others.

    Raises:
        ConfigError: the file cannot be read, or a row is wrong; its line is named.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:  # spreadsheets write a BOM
            rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("a trace cannot be read", given=f"{path} ({error})") from error
    if not rows or not set(HEADER) <= set(rows[0]):
        raise ConfigError(
            "this file is no trace", given=str(path), expected=f"a first line {','.join(HEADER)}"
        )
    numbers: dict[str, int] = {}
    found = [_row(row, number + 1, numbers) for number, row in enumerate(rows)]
    known = len(numbers)
    copies = range(1, -(-members // known)) if members > known else range(0)
    return tuple(found) + tuple(
        (who + copy * known, since, until) for copy in copies for who, since, until in found
    )


def _row(row: Mapping[str, str], place: int, numbers: dict[str, int]) -> tuple[int, float, float]:
    who = numbers.setdefault(row["member"], len(numbers))
    try:
        since_s, until_s = float(row["from_s"]), float(row["to_s"])
    except (TypeError, ValueError):
        since_s, until_s = 0.0, -1.0
    if not 0 <= since_s <= until_s < float("inf"):
        raise ConfigError(
            "a row of a trace is wrong",
            given=f"row {place}: {row['from_s']!r} to {row['to_s']!r}",
            expected="seconds from the start, the second not before the first",
        )
    return who, since_s, until_s
