"""One rehearsal from begin to end: start, submit, faults on time, the curve as it is seen."""

from __future__ import annotations

import heapq
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.errors import JobError
from atoll.fleet.faults import Fault, Trouble
from atoll.rehearse.curve import START, Curve, Moment
from atoll.rehearse.rehearsal import Rehearsal, slowed
from atoll.rehearse.site import TICK_S, Pause, Site, wait

BEGIN_S = 180.0
"""Until every machine that is there has done its first step: they load torch on the same cores."""
PATIENCE_S, PATIENCE = 60.0, 3.0
"""A rehearsal ends without its last step after so many seconds, and so many times the prediction.
"""

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a rehearsal showed, in seconds of this machine."""

    curve: Curve
    events: tuple[tuple[float, str], ...]
    """When which fault was done, and what the hub said of it."""
    zero: float = 0.0
    """The wall clock's time of the first step."""
    interrupted: bool = False


def conduct(
    rehearsal: Rehearsal, folder: Path, *, expected_s: float, pause: Pause, say: Say
) -> Seen:
    """Run a rehearsal in network namespaces; nothing is left of it, however it ends.

    Args:
        rehearsal: What.
        folder: For logs and the hub's files.
        expected_s: Predicted seconds on this machine.
        pause: Waits; returns whether to end early.
        say: Takes lines for a person.

    Raises:
        LabError: this machine has no network namespaces.
        HubError: hub or machines did not start.
        JobError: the job failed.
    """
    site = Site(slowed(rehearsal), folder)
    try:
        say(f"starting a hub and {len(rehearsal.first)} machines in network namespaces ...")
        site.start()
        for name in rehearsal.first:
            site.begin(name)
        from atoll.config import dump_spec

        job = site.submit(dump_spec(rehearsal.spec), members=len(rehearsal.first))
        seen = _Watch(rehearsal, site, job)
        return seen.follow(limit_s=PATIENCE_S + PATIENCE * expected_s, pause=pause, say=say)
    finally:
        site.close()


@dataclass
class _Member:
    """What one member reported last, and the bytes of its earlier processes."""

    steps: float = 0.0
    loss: float = math.nan
    sent_bytes: float = 0.0
    earlier_bytes: float = 0.0


@dataclass
class _Watch:
    """Follows a job by the files that its hub writes."""

    rehearsal: Rehearsal
    site: Site
    job: str
    members: dict[str, _Member] = field(default_factory=lambda: defaultdict(_Member))
    begun: dict[str, float] = field(default_factory=dict)
    """When each member began, by the wall clock."""
    moments: list[Moment] = field(default_factory=lambda: [START])
    events: list[tuple[float, str]] = field(default_factory=list)
    rounds: float = 0.0
    _first_round: float = math.inf
    """Rounds before the first step, in which members agree on where they start."""
    _read: int = 0
    _events_read: int = 0
    _zero: float = 0.0
    """The wall clock's time of the first step."""
    _early: list[dict[str, Any]] = field(default_factory=list)

    def follow(self, *, limit_s: float, pause: Pause, say: Say) -> Seen:
        wanted = len(self.rehearsal.first)
        if not wait(pause, lambda: self._begun(wanted), timeout_s=BEGIN_S):
            return self._ended(interrupted=True)
        self._zero = max(sorted(self.begun.values())[:wanted])
        for line in self._early:
            self._take(line)
        say("they train")
        due = list(_actions(slowed(self.rehearsal).faults))
        heapq.heapify(due)
        while True:
            now_s = time.time() - self._zero
            while due and due[0][0] <= now_s:
                _, _, name, verb, text = heapq.heappop(due)
                getattr(self.site, verb)(name)
                self.events.append((now_s, text))
                say(text)
            self._look()
            self.site.check()
            if self.moments[-1].steps >= self.rehearsal.steps or now_s > limit_s:
                return self._ended()
            self._raise_if_failed()
            if pause(TICK_S):
                return self._ended(interrupted=True)

    def _begun(self, wanted: int) -> bool:
        """Return whether so many members have begun; raises JobError or HubError if none will."""
        self._raise_if_failed()
        self.site.check()
        return self._look() >= wanted

    def _ended(self, *, interrupted: bool = False) -> Seen:
        curve = Curve(tuple(self.moments)).until(self.rehearsal.steps)
        return Seen(
            curve=curve,
            events=tuple(self.events),
            zero=self._zero,
            interrupted=interrupted,
        )

    def _look(self) -> int:
        """Read what is new; return how many members have begun."""
        lines, self._read = self.site.lines(self.job, "metrics.jsonl", after=self._read)
        for line in lines:
            if not line["step"] or "wall_s" not in line["values"]:
                continue  # it builds its model, or agrees with the others on a start
            if line["member"] not in self.begun:
                self.begun[line["member"]] = line["time"] - line["values"]["wall_s"]
            if self._zero:
                self._take(line)
            else:
                self._early.append(line)
        return len(self.begun)

    def _take(self, line: dict[str, Any]) -> None:
        """Add a member's point to the curve."""
        values, member = line["values"], self.members[line["member"]]
        if "sent_bytes" not in values:
            return
        if values["sent_bytes"] < member.sent_bytes:  # another process of the same member
            member.earlier_bytes += member.sent_bytes
        member.sent_bytes = values["sent_bytes"]
        member.steps = max(member.steps, float(line["step"]))
        member.loss = values.get("loss", member.loss)
        self._first_round = min(self._first_round, float(line["round"]))
        self.rounds = max(self.rounds, float(line["round"]) - self._first_round)
        losses = [one.loss for one in self.members.values() if not math.isnan(one.loss)]
        seconds = max(self.moments[-1].seconds, line["time"] - self._zero)
        self.moments.append(
            Moment(
                seconds=seconds, steps=max(one.steps for one in self.members.values()),
                rounds=self.rounds,
                sent_bytes=sum(m.sent_bytes + m.earlier_bytes for m in self.members.values()),
                loss=sum(losses) / len(losses) if losses else math.nan,
            )
        )  # fmt: skip

    def _raise_if_failed(self) -> None:
        lines, self._events_read = self.site.lines(
            self.job, "events.jsonl", after=self._events_read
        )
        for line in lines:
            if line["kind"] == "failed":
                raise JobError(
                    "the job of the rehearsal failed", given=str(line["text"]),
                    remedy=f"logs are in {self.site.folder}",
                )  # fmt: skip


_Action = tuple[float, int, str, str, str]
"""When, a tie-breaker, the machine, the verb of `Site`, words."""


def _actions(faults: Sequence[Fault]) -> Iterator[_Action]:
    """Yield what is done to the machines, and what ends it."""
    for number, fault in enumerate(faults):
        name, (begin_s, end_s) = fault.machine, fault.absence
        if fault.trouble == Trouble.JOIN:
            yield end_s, number, name, "begin", f"{name} joins"
            continue
        verb, back, words, back_words = DOING[fault.trouble]
        yield begin_s, number, name, verb, f"{name} {words}"
        if not math.isinf(end_s):
            yield end_s, number, name, back, f"{name} {back_words}"


DOING = {
    Trouble.KILL: ("kill", "begin", "is killed", "starts again"),
    Trouble.SLEEP: ("sleep", "wake", "falls asleep", "wakes up"),
    Trouble.CUT: ("cut", "heal", "loses its line", "has its line again"),
}
