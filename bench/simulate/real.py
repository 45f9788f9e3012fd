"""Six real processes through a schedule of faults, and the same six simulated.

A hub, agents and members in network namespaces do a job of their own (`atoll rehearse`): machines
of unequal speed on unequal lines are killed, come late, fall asleep and lose their lines. The
simulation has the same machines, lines and faults. Both are counted from the first step to the
verdict of the last round.

goodput   share of the machines' time that ended in steps of committed rounds
error     simulated / real - 1
start_s   from the start of an agent to its member's first step, as the real run took it: what this
          machine needs to load torch is no part of the model
"""

from __future__ import annotations

import dataclasses
import json
import os
import sqlite3
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.config import load_spec
from atoll.fleet.faults import Trouble
from atoll.fleet.reading import read_fleet
from atoll.forecast.predict import Forecast
from atoll.forecast.workload import Workload, workload_of
from atoll.hub.rounds.timeline import CatchUp, find_catch_up
from atoll.node.machine.probe import usable_cores
from atoll.rehearse.conduct import Seen, conduct
from atoll.rehearse.expected import expected
from atoll.rehearse.rehearsal import Here, Rehearsal, prepare
from atoll.rehearse.simulated import world_of
from atoll.simulate.record import Spent

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "planning"
LENGTH_S, QUICK_S = 285.0, 90.0
"""The long one ends behind the last fault of the schedule."""


@dataclass(frozen=True, kw_only=True)
class Played:
    """What became of the machines' time from the first step to the last verdict."""

    seconds: float
    shares: Mapping[Spent, float]
    """Of all machines together, by `Spent`; of a real run the first three."""
    rounds: Sequence[int]
    """How many members contributed to each."""

    @classmethod
    def of(
        cls, plan: Rehearsal, spent: Mapping[Spent, float], *, seconds: float, rounds: Sequence[int]
    ) -> Played:
        """Return shares of the time in which machines had joined."""
        late = [f.absence[1] for f in plan.fleet.faults if f.trouble == Trouble.JOIN]
        there_s = len(plan.fleet) * seconds - sum(late)
        shares = {name: s / there_s for name, s in spent.items()}
        return cls(seconds=seconds, shares=shares, rounds=rounds)

    @property
    def goodput(self) -> float:
        """Share that ended in steps of committed rounds."""
        return self.shares[Spent.USEFUL]


def read_rounds(folder: Path) -> list[CatchUp]:
    """Return the committed rounds of the one job of a hub that has ended."""
    connection = sqlite3.connect(folder / "data" / "hub.sqlite")
    try:
        ((job,),) = connection.execute("SELECT job FROM jobs").fetchall()
        return find_catch_up(connection, job)
    finally:
        connection.close()


def read_starts(folder: Path, seen: Seen) -> list[float]:
    """Return the seconds of each start of an agent behind the first step to its member's model."""
    (log,) = (folder / "jobs").glob("*/metrics.jsonl")
    begun: dict[str, float] = {}
    for line in map(json.loads, log.read_text(encoding="utf-8").splitlines()):
        begun.setdefault(line["incarnation"], line["time"] - seen.zero)
    starts = [at for at, text in seen.events if text.endswith(("starts again", "joins"))]
    return [min(t for t in begun.values() if t > at) - at for at in starts]


def measured(plan: Rehearsal, rounds: Sequence[CatchUp], *, zero: float) -> Played:
    """Return what real processes did, by the committed rounds behind the first step.

    Args:
        plan: What was run; its machines' names are those of the hub's nodes.
        rounds: As the hub has written them.
        zero: The wall clock's time of the first step.
    """
    later = [one for one in rounds if one.time > zero and any(row.steps for row in one.rows)]
    spent = {Spent.USEFUL: 0.0, Spent.WAITING: 0.0, Spent.COMMUNICATING: 0.0}
    for one in later:
        for row in one.rows:
            if row.member in one.contributors:
                spent[Spent.USEFUL] += row.steps * plan.step_s[row.node]
                spent[Spent.WAITING] += row.wait_s or 0.0
                spent[Spent.COMMUNICATING] += (row.send_s or 0.0) + (row.vote_s or 0.0)
    return Played.of(
        plan, spent, seconds=later[-1].time - zero, rounds=[len(x.contributors) for x in later]
    )


def simulated(
    plan: Rehearsal, forecast: Forecast, *, elements: int, seconds: float, start_s: float
) -> Played:
    """Return the simulation of as many seconds, with starts that take as long."""
    world = world_of(plan, forecast, elements=elements, duration_s=seconds, start_s=start_s)
    found = world.run()
    spent = {name: world.record.seconds[name] for name in Spent}
    rounds = [x["contributors"] for x in found.timeline if x["committed"] and x["round"]]
    return Played.of(plan, spent, seconds=seconds, rounds=rounds)


def compared(real: Played, simulated: Played) -> list[dict[str, Any]]:
    """Return both as rows of a table."""
    return [
        {
            "what": what, "goodput": round(one.goodput, 4),
            "waiting": round(one.shares[Spent.WAITING], 4),
            "communicating": round(one.shares[Spent.COMMUNICATING], 4),
            "rounds": len(one.rounds), "contributions": sum(one.rounds),
        }
        for what, one in (("real", real), ("simulated", simulated))
    ]  # fmt: skip


def beside(folder: Path, *, seconds: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run six processes and simulate them; logs and the hub's files are left in `folder`.

    Returns:
        The figures, and the rows of a table.

    Raises:
        LabError: this machine has no network namespaces.
        JobError: the job failed.
    """
    plan, forecast, load = rehearsal_of(seconds)
    expected_s = expected(plan, load).end.seconds
    seen = conduct(plan, folder, expected_s=expected_s, pause=_pause, say=_say)
    start_s = statistics.mean(read_starts(folder, seen))
    real = measured(plan, read_rounds(folder), zero=seen.zero)
    found = simulated(plan, forecast, elements=load.elements, seconds=real.seconds, start_s=start_s)
    figures = {
        "goodput": round(real.goodput, 4), "simulated": round(found.goodput, 4),
        "error": round(found.goodput / real.goodput - 1, 4), "seconds": round(real.seconds, 1),
        "start_s": round(start_s, 1), "load": round(os.getloadavg()[0], 1),
    }  # fmt: skip
    return figures, compared(real, found)


def rehearsal_of(seconds: float) -> tuple[Rehearsal, Forecast, Workload]:
    """Return the six machines' job for about so many seconds, with the faults within them."""
    spec, fleet = load_spec(EXAMPLES / "small.toml"), read_fleet(EXAMPLES / "six.toml")
    faults = tuple(fault for fault in fleet.faults if fault.at_s < seconds)
    fleet, load = dataclasses.replace(fleet, faults=faults), workload_of(spec)
    here = Here(0.0, usable_cores())
    plan, forecast = prepare(spec, fleet, load, here=here, seconds=seconds, slower=1.0)
    return plan, forecast, load


def _pause(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
