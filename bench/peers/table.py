"""The rows: every system on every link, beside members that do not communicate."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.peers.hosts import Hosts
from bench.peers.rivals import Rival
from bench.peers.running import Outcome, load, play, stall
from bench.peers.setting import Setting
from bench.peers.systems import ALONE, ATOLL, GLOO, Running, start_job, start_programs
from bench.recovery.notes import Trouble
from bench.slowlink import LISTENING, Site

KILL_STEPS, KILL_EVERY = 110, 20
"""Runs in which a member is killed have more rounds."""
KILL_AFTER = 70
"""Steps: in the middle between the third round and the fourth."""

FIGURES = (
    "system", "link", "seconds", "utilisation", "mb_per_host", "loss", "stall_after_kill_s",
    "identical", "stood_s", "cpu_s", "machine_s", "load", "note",
)  # fmt: skip

Row = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    setting: Setting
    systems: Sequence[str]
    links: Sequence[str]
    kill_links: Sequence[str] = ()
    """Those on which a member is killed in a run of its own."""


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


class Stand:
    """Hosts on one link, and on them a hub with nodes once a system needs one."""

    def __init__(self, hosts: Hosts, members: int, *, listening: Sequence[str] = LISTENING) -> None:
        """Start nothing yet."""
        self.hosts, self._members, self._listening = hosts, members, listening
        self._open = ExitStack()
        self._site: Site | None = None

    def starter(
        self, system: str, folder: Path, setting: Setting, rival: Rival | None
    ) -> Callable[[], Running]:
        """Return what starts the members of a system."""
        if system in ATOLL:
            return partial(start_job, system, self.site(), folder, setting)
        python = rival.python if rival is not None else sys.executable
        return partial(start_programs, system, self.hosts, folder, setting, python=python)

    def site(self) -> Site:
        """Return the hub and its nodes; they stay up until `close`.

        Raises:
            RuntimeError: the hub does not start.
        """
        if self._site is None:
            temporary = tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True)
            folder = Path(self._open.enter_context(temporary))
            made = Site(folder, self.hosts, listening=self._listening)
            self._open.callback(made.close)
            made.gather(self._members)
            self._site = made
        return self._site

    def close(self) -> None:
        """End the hub and the nodes."""
        self._site = None
        self._open.close()


@contextmanager
def stand(hosts: Hosts, members: int, **options: Any) -> Iterator[Stand]:
    """Give a stand that is closed at the end."""
    made = Stand(hosts, members, **options)
    try:
        yield made
    finally:
        made.close()


def measure_link(plan: Plan, link: str, place: Stand, rivals: dict[str, Rival]) -> Iterator[Row]:
    """Yield a row for each system on one link; without communication first, and again at the end.

    The machine may have more to do at the end: what is compared with is the mean of both.
    """
    if ALONE in plan.systems:
        yield measure(plan, ALONE, link, place, None)
    for system in plan.systems:
        if system != ALONE:
            yield measure(plan, system, link, place, rivals.get(system))
    place.close()
    if ALONE in plan.systems and len(plan.systems) > 1:
        yield measure(plan, ALONE, link, place, None)


def measure(plan: Plan, system: str, link: str, place: Stand, rival: Rival | None) -> Row:
    """Return a system's row; what could not be measured is null, and `note` says why."""
    row: Row = dict.fromkeys(FIGURES) | {"system": system, "link": link, "note": ""}
    row["load"] = round(load(), 1)
    if rival is not None and rival.reason:
        return row | {"note": rival.reason}
    try:
        found = once(plan.setting, system, place, rival)
        row |= figures(found)
        if link in plan.kill_links and system not in (ALONE, GLOO):
            setting = dataclasses.replace(plan.setting, steps=KILL_STEPS, every=KILL_EVERY)
            killed = once(setting, system, place, rival, kill_after=KILL_AFTER)
            row["stall_after_kill_s"] = round(stall(killed, every=setting.every), 2)
    except (Trouble, RuntimeError, subprocess.SubprocessError) as error:
        row["note"] = str(error)  # the other rows are worth having
    if system == GLOO and link in plan.kill_links:
        row["note"] = "a lost member ends the others"
    row["load"] = round(load(), 1)
    return row


def figures(found: Outcome) -> Row:
    """Return what goes into a row."""
    sent = found.mb_per_host
    return {
        "seconds": round(found.seconds, 2),
        "mb_per_host": round(sent, 2) if sent is not None else None,
        "loss": round(found.loss, 4),
        "identical": found.identical,
        "stood_s": round(found.stood_s, 2),
        "cpu_s": round(found.cpu_s, 2),
        "machine_s": round(found.machine_s, 2),
    }


def once(
    setting: Setting, system: str, place: Stand, rival: Rival | None, *, kill_after: int = 0
) -> Outcome:
    """Run a system once in an empty folder."""
    with tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        setting.write(folder)
        start = place.starter(system, folder, setting, rival)
        try:
            return play(start, place.hosts, folder, setting, kill_after=kill_after)
        except Trouble as error:
            raise Trouble(f"{error} ({_last_words(folder)})") from error


def _last_words(folder: Path) -> str:
    """Return the last line of each member's log."""
    logs = sorted(folder.glob("*.log"))
    lines = [path.read_text(encoding="utf-8", errors="replace").splitlines() for path in logs]
    said = {path.stem: own[-1][:200] for path, own in zip(logs, lines, strict=True) if own}
    return "; ".join(f"{name}: {line}" for name, line in said.items()) or "nothing was said"


def compare(rows: Sequence[Row]) -> None:
    """Fill in the utilisation: the seconds without communication over those of the row."""
    for link in {row["link"] for row in rows}:
        here = [row for row in rows if row["link"] == link and row["seconds"]]
        alone = [row["seconds"] for row in here if row["system"] == ALONE]
        for row in here if alone else ():
            row["utilisation"] = round(sum(alone) / len(alone) / row["seconds"], 3)
