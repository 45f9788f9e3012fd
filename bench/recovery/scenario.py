"""What happens to three machines, the same on every side: a loss, a return, a freeze, a thaw."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from bench.recovery.notes import Traced, Trouble, Watch, until

MEMBERS = ("w0", "w1", "w2")
BETWEEN = 0.75
"""Where between two rounds a fault comes: late, when no member's patience has run down already."""

WARM_ROUNDS = 5
START_S, RETURN_S = 90.0, 90.0
STALL_S = 150.0
"""Longer than any default that is known."""


class Side(Protocol):
    """Three members under some system, which note into a folder."""

    watch: Watch

    def start(self) -> None:
        """Start everything."""
        ...

    def restart(self, member: str) -> None:
        """Start a member again that was killed, unless the system does so by itself."""
        ...

    def kill(self, traced: Traced) -> None:
        """`kill -9` a member."""
        ...

    def freeze(self, traced: Traced) -> None:
        """Stop a member without ending it."""
        ...

    def thaw(self, traced: Traced) -> None:
        """Let a stopped member go on."""
        ...


@dataclass
class Found:
    """The figures of one side; a list has one entry per repetition."""

    stalls_s: list[float] = field(default_factory=list)
    """How much longer than normal the survivors waited when one was killed between two rounds."""
    within_s: list[float] = field(default_factory=list)
    """The same when it was killed in the middle of a round."""
    frozen_s: list[float] = field(default_factory=list)
    join_stalls_s: list[float] = field(default_factory=list)
    """How much longer than normal the longest round was in which somebody came in."""
    imports_s: list[float] = field(default_factory=list)
    useful_s: list[float] = field(default_factory=list)
    """From the end of a joiner's imports to its first gradient from the common state."""
    counted_s: list[float] = field(default_factory=list)
    """From the end of its imports to the first committed round after such a step."""
    wasted: list[int] = field(default_factory=list)
    thawed_s: list[float] = field(default_factory=list)
    normal_round_s: float = 0.0
    identical: bool = False
    compared_rounds: int = 0
    trouble: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return medians, and the worst stall."""
        return {
            "stall_over_normal_s": _median(self.stalls_s),
            "worst_stall_s": round(max(self.stalls_s), 3) if self.stalls_s else None,
            "stall_within_round_s": _median(self.within_s),
            "worst_within_s": round(max(self.within_s), 3) if self.within_s else None,
            "frozen_stall_s": _median(self.frozen_s),
            "thawed_back_s": _median(self.thawed_s),
            "joiner_imports_s": _median(self.imports_s),
            "joiner_useful_s": _median(self.useful_s),
            "joiner_counted_s": _median(self.counted_s),
            "join_stall_s": _median(self.join_stalls_s),
            "wasted_steps": max(self.wasted) if self.wasted else None,
            "identical": self.identical,
            "compared_rounds": self.compared_rounds,
            "normal_round_s": round(self.normal_round_s, 3),
            "kills": len(self.stalls_s),
            **({"trouble": self.trouble} if self.trouble else {}),
        }


def play(side: Side, *, kills: int, within: int, freezes: int) -> Found:
    """Do everything to one side and return the figures; trouble ends it early and is reported.

    Args:
        side: The system.
        kills: How often a member is killed between two rounds.
        within: How often in the middle of a round, at different moments of it.
        freezes: How often a member is stopped for a while.
    """
    found = Found()
    try:
        side.start()
        everybody = [_back(side, member, rounds=WARM_ROUNDS, after=0.0) for member in MEMBERS]
        found.normal_round_s = everybody[0].normal_gap(until_=time.monotonic())
        for number in range(kills):
            _kill(side, MEMBERS[-1 - number % 2], found, in_round=0.0)
        for number in range(within):
            share = (number + 1) / (within + 1)
            _kill(side, MEMBERS[-1 - number % 2], found, in_round=share)
        for _ in range(freezes):
            _freeze(side, MEMBERS[1], found)
    except (Trouble, OSError) as trouble:  # OSError: a process ended that should not have
        found.trouble = str(trouble)
    found.compared_rounds = side.watch.compared_rounds()
    found.identical = found.compared_rounds > 0 and not side.watch.differing_rounds()
    return found


def _kill(side: Side, victim: str, found: Found, *, in_round: float) -> None:
    """Kill a member; then see it come back."""
    traced, others = _line_up(side, victim, in_round=in_round)
    before = [one.pid for one in side.watch.all()]
    moment = time.monotonic()
    side.kill(traced)
    stalls = found.within_s if in_round else found.stalls_s
    stalls.append(_stall(side, others, moment))
    side.restart(victim)
    until(lambda: side.watch.newest(victim, besides=before), f"{victim} starts", timeout_s=RETURN_S)
    _joined(_back(side, victim, rounds=2, after=moment, besides=before), others, found)


def _freeze(side: Side, victim: str, found: Found) -> None:
    """Freeze a member between two rounds; thaw it when the others have gone on."""
    traced, others = _line_up(side, victim, in_round=0.0)
    moment = time.monotonic()
    side.freeze(traced)
    try:
        found.frozen_s.append(_stall(side, others, moment))
    finally:
        thawed = time.monotonic()
        side.thaw(traced)
    back = _back(side, victim, rounds=1, after=thawed)
    found.thawed_s.append(next(n["at"] for n in back.commits() if n["at"] > thawed) - thawed)


def _line_up(side: Side, victim: str, *, in_round: float) -> tuple[Traced, list[Traced]]:
    """Wait for some normal rounds of all three, and then for the moment of the fault.

    Args:
        side: The system.
        victim: Whom it will hit.
        in_round: After which share of a round; 0: between two rounds.
    """
    now = time.monotonic()
    everybody = {member: _back(side, member, rounds=3, after=now) for member in MEMBERS}
    traced = everybody.pop(victim)
    last = len(traced.commits())

    def due() -> bool:
        traced.refresh()
        commits = traced.commits()
        gap = traced.normal_gap(until_=time.monotonic(), last=3)
        round_s = statistics.median(float(note["seconds"]) for note in commits[-3:])
        wait_s = gap - round_s * (1 - in_round) if in_round else BETWEEN * (gap - round_s)
        return len(commits) > last and time.monotonic() - commits[-1]["at"] >= wait_s

    until(due, f"{victim} is ready for a fault", timeout_s=START_S)
    return traced, list(everybody.values())


def _stall(side: Side, others: Sequence[Traced], moment: float) -> float:
    """Return how much longer than normal the round after a fault took, the worst survivor's."""

    def committed() -> bool:
        side.watch.all()
        return all(sum(n["at"] > moment for n in one.commits()) >= 3 for one in others)

    until(committed, "the survivors go on", timeout_s=STALL_S)
    return max((o.gap_after(moment) or 0.0) - o.normal_gap(until_=moment) for o in others)


def _back(
    side: Side, member: str, *, rounds: int, after: float, besides: Sequence[int] = ()
) -> Traced:
    """Wait until a member has committed so many rounds after a moment; return its process."""

    def committed() -> Traced | None:
        one = side.watch.newest(member, besides=besides)
        if one is None or sum(note["at"] > after for note in one.commits()) < rounds:
            return None
        return one

    return until(committed, f"{rounds} rounds of {member}", timeout_s=START_S)


def _joined(joiner: Traced, others: Sequence[Traced], found: Found) -> None:
    """Read from a joiner's notes when it was of use, and what it did in vain."""
    imports, recovered = joiner.moment("imports"), joiner.moment("recovered")
    useful = [note for note in joiner.steps() if note["at"] - note["seconds"] > recovered]
    found.imports_s.append(imports - joiner.moment("started"))
    found.wasted.append(len(joiner.steps()) - len(useful))
    # A step that ends with a round ends late; its own part is over when that begins.
    found.useful_s.append(useful[0]["at"] - useful[0]["seconds"] - imports)
    counted = next(n["at"] for n in joiner.commits() if n["at"] >= useful[0]["at"])
    found.counted_s.append(counted - imports)
    gaps = []
    for other in others:
        times = [n["at"] for n in other.commits() if n["at"] >= imports]
        normal = other.normal_gap(until_=imports)
        gaps += [b - a - normal for a, b in itertools.pairwise(times) if a <= counted]
    found.join_stalls_s.append(max(gaps, default=0.0))


def _median(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 3) if values else None
