"""One run: members are started, begin together, and end; one may be killed in between."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench.peers.hosts import Hosts
from bench.peers.member import GO, notes_of, state_of
from bench.peers.setting import Setting, held_out_loss
from bench.peers.systems import Running
from bench.recovery.notes import Trouble

READY_S, TRAIN_S = 900.0, 900.0
"""Machines that do much else are slow, and no member waits for those that have ended."""
LOOK_S = 0.2

Notes = list[dict[str, Any]]


@dataclass
class Outcome:
    """What a run came to."""

    seconds: float = 0.0
    """From the moment at which all could begin until the last one had its last parameters."""
    loss: float = 0.0
    """Held-out, of the mean of the members' parameters, in nats per byte."""
    identical: bool = False
    """Whether all ended with the same parameters, bit for bit."""
    mb_per_host: float | None = None
    """Sent by a member's host, headers included, mean of the members; None: not counted."""
    stood_s: float = 0.0
    """How long members did no step, mean: all gaps between steps beyond twice the median one."""
    cpu_s: float = 0.0
    """Processor seconds of a member's training process since the beginning, mean."""
    machine_s: float = 0.0
    """Processor seconds of everything on the machine meanwhile."""
    steps: list[list[float]] = field(default_factory=list)
    """The moments at which steps ended, of each survivor."""
    killed_at: float = 0.0


def notes(folder: Path, slot: int) -> Notes:
    """Return what a member has noted so far, all its processes together."""
    found: Notes = []
    for path in sorted(folder.glob(notes_of(slot)), key=lambda path: path.stat().st_mtime):
        text = path.read_text(encoding="utf-8")
        found += [json.loads(line) for line in text.splitlines(True) if line.endswith("\n")]
    return found


def has(folder: Path, slots: Sequence[int], kind: str) -> bool:
    """Return whether all of some members have noted this."""
    return all(any(note["kind"] == kind for note in notes(folder, slot)) for slot in slots)


def play(
    start: Callable[[], Running],
    hosts: Hosts,
    folder: Path,
    setting: Setting,
    *,
    kill_after: int = 0,
) -> Outcome:
    """Run a system once in a folder that has the setting in it.

    Args:
        start: Starts the members.
        hosts: Where they are.
        folder: Of this run alone.
        setting: Its size.
        kill_after: The last member is killed after so many steps; 0: never.

    Raises:
        Trouble: it did not begin, or not end.
    """
    slots, outcome = list(range(setting.members)), Outcome()
    running = start()
    try:
        _while(running, lambda: has(folder, slots, "ready"), "all members connected", READY_S)
        before = [hosts.sent_bytes(slot + 1) for slot in slots]
        began, busy = time.monotonic(), busy_s()
        (folder / GO).touch()
        if kill_after:
            _while(running, lambda: _reached(folder, slots, kill_after), "the kill", TRAIN_S)
            outcome.killed_at = time.monotonic()
            kill_tree(notes(folder, slots.pop())[0]["pid"])
        _while(running, lambda: has(folder, slots, "done"), "the end", TRAIN_S)
        outcome.machine_s = busy_s() - busy
        after = [hosts.sent_bytes(slot + 1) for slot in slots]
    finally:
        running.stop()
    noted = {slot: notes(folder, slot) for slot in slots}
    outcome.seconds = max(at(own, "done")[-1] for own in noted.values()) - began
    sent = [b - a for a, b in zip(before, after, strict=False) if a is not None and b is not None]
    outcome.mb_per_host = statistics.mean(sent) / 1e6 if sent else None
    outcome.steps = [at(own, "step") for own in noted.values()]
    outcome.stood_s = statistics.mean(stood(moments) for moments in outcome.steps)
    used = [note["cpu_s"] for own in noted.values() for note in own if note["kind"] == "done"]
    outcome.cpu_s = statistics.mean(used)
    ends = [np.load(folder / state_of(slot)) for slot in slots]
    outcome.identical = all(np.array_equal(ends[0], other) for other in ends[1:])
    mean = np.asarray(np.mean(ends, axis=0, dtype=np.float64), dtype=np.float32)
    outcome.loss = held_out_loss(setting, folder, mean)
    return outcome


def _while(running: Running, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
    """Wait until a condition is true, as long as somebody lives who can make it so.

    Seldom looked at: members need the cores, and the notes have the moments.

    Raises:
        Trouble: it did not become true.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if not running.alive() and not condition():
            raise Trouble(f"the members ended before: {what}")
        if time.monotonic() > deadline:
            raise Trouble(f"not within {timeout_s:g} s: {what}")
        time.sleep(LOOK_S)


def _reached(folder: Path, slots: Sequence[int], step: int) -> bool:
    return all(len(at(notes(folder, slot), "step")) >= step for slot in slots)


def at(noted: Notes, kind: str) -> list[float]:
    """Return the moments of one kind of notes."""
    return [float(note["at"]) for note in noted if note["kind"] == kind]


def gaps(moments: Sequence[float]) -> list[float]:
    """Return the seconds from one step to the next."""
    return [b - a for a, b in itertools.pairwise(moments)]


def stood(moments: Sequence[float]) -> float:
    """Return how much longer gaps were than twice the median one, all together."""
    found = gaps(moments)
    usual = statistics.median(found) if found else 0.0
    return sum(gap - usual for gap in found if gap > 2 * usual)


def stall(outcome: Outcome, *, every: int) -> float:
    """Return how much longer a survivor stood still after the kill than in a normal round.

    That is its longest gap after the kill minus its longest one before it; the first round does not
    count, in which connections are made. The survivor with the largest difference.
    """
    return max(_stall(moments, outcome.killed_at, every) for moments in outcome.steps)


def _stall(moments: Sequence[float], killed_at: float, every: int) -> float:
    pairs = list(enumerate(gaps(moments), start=2))
    before = [gap for step, gap in pairs if step > every and moments[step - 1] <= killed_at]
    after = [gap for step, gap in pairs if moments[step - 1] > killed_at]
    return max(after, default=0.0) - max(before, default=0.0)


def kill_tree(pid: int) -> None:
    """`kill -9` a process and all that it has started."""
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def busy_s() -> float:
    """Return the seconds that the machine's processors have worked since it was started."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - sum(
        getattr(times, name, 0.0) for name in ("iowait", "steal", "guest", "guest_nice")
    )  # fmt: skip


def load() -> float:
    """Return how many programs wanted to run in the last minute; NaN where it is unknown."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
