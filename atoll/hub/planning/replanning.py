"""Plans running jobs again when their machines or lines have changed by more than 20 %.

What a job file names in `planned` is answered anew by the planner for the members as they are, with
the measured seconds of a step. A new interval, codec and delay come with the next verdict, so that
all members take them after the same round; a new collective comes with the next plan. Codec and
delay follow measured rounds again from there. The job's activity says so in a line.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from atoll.clock import Clock
from atoll.errors import AtollError
from atoll.hub.jobs.jobs import Job
from atoll.hub.nodes.services import JobServices
from atoll.hub.planning.changes import Line, Lines, Watch
from atoll.hub.planning.planner import AWAY, Planner, Running
from atoll.hub.rounds.runtime import RoundRuntime
from atoll.rounds.timing import expect_round
from atoll.wire.states import JobState

logger = logging.getLogger(__name__)

KIND = "planned-again"
LOOK_EVERY_S = 5.0

Nodes = Callable[[], list[dict[str, Any]]]


@dataclass
class Replanner:
    """See the module's docstring."""

    services: JobServices
    planner: Planner
    nodes: Nodes
    clock: Clock
    hub: str = ""
    _watches: dict[str, Watch] = field(default_factory=dict)

    async def run(self) -> None:
        """Look at all jobs until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                await self.look()
            except Exception:
                logger.exception("jobs were not looked at")

    async def look(self) -> None:
        """Plan those jobs again whose machines have changed for long enough."""
        jobs = {job.job: job for job in self.services.stores.jobs.list() if self._concerns(job)}
        self._watches = {name: one for name, one in self._watches.items() if name in jobs}
        rows = {str(row["node"]): row for row in self.nodes()} if jobs else {}
        for job in jobs.values():
            if not self._concerns(job):
                continue  # it has ended while another one was planned
            here = self._here(job, rows)
            if not here or self.services.rounds.machine(job.job).starting:
                continue  # no member takes part yet, or some are still starting
            lines = Lines({n: Line.of(row) for n, row in here.items()}, self._between(job, here))
            watch = self._watches.setdefault(job.job, Watch(lines))
            if why := watch.look(lines, self.clock.monotonic()):
                await self._again(job, here, why)

    def _concerns(self, job: Job) -> bool:
        rounds = self.services.rounds
        if job.state != JobState.RUNNING or not rounds.has(job.job):
            return False
        return bool(job.spec.planned_again) and not rounds.runtime(job.job).grouped

    def _here(self, job: Job, rows: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return the machines of the members that take part, by a name for each.

        That is the node's; of several members on one node, node and member.
        """
        machine = self.services.rounds.machine(job.job)
        found: dict[str, dict[str, Any]] = {}
        for member in machine.members.trainers():
            row = rows.get(job.members[member].node) if member in job.members else None
            if row is None or row.get("state") in AWAY:
                continue
            name = str(row["node"])
            name = f"{name}-{member}" if name in found else name
            found[name] = {**row, "node": name, "member": member}
        return found

    def _between(
        self, job: Job, here: Mapping[str, Mapping[str, Any]]
    ) -> dict[tuple[str, str], Line]:
        """Return the lines between members, as they have measured them."""
        names = {row["member"]: name for name, row in here.items()}
        return {
            (names[a], names[b]): Line(8 * bytes_per_s, 0.0, 1000 * trip_s)
            for (a, b), (trip_s, bytes_per_s) in self.services.rounds.machine(
                job.job
            ).lines.lines.items()
            if a in names and b in names
        }

    async def _again(self, job: Job, here: Mapping[str, dict[str, Any]], why: str) -> None:
        runtime = self.services.rounds.runtime(job.job)
        known = runtime.machine.commit_log.timings.step_s
        steps = {name: known[row["member"]] for name, row in here.items() if row["member"] in known}
        current = _current(job, runtime)
        try:
            plan = await self.planner.ask(
                job.text, list(here.values()), hub=self.hub,
                running=Running(
                    keys=job.spec.planned_again, current=current, step_s=steps,
                    links=[
                        {"between": pair, "mbps": line.up_bps / 1e6, "latency_ms": line.latency_ms}
                        for pair, line in self._between(job, here).items()
                    ],
                ),
            )  # fmt: skip
        except (AtollError, OSError) as error:
            if runtime.closed:
                return
            text = f"not planned again although {why}: {error}"
            await self.services.stores.events.add(job.job, KIND, text)
            return
        answers: dict[str, Any] = plan["answers"]
        async with runtime.lock:
            if runtime.closed:
                return
            if "every" in answers:
                runtime.machine.commit_log.every = int(answers["every"])
            if "collective" in answers:
                runtime.machine.collective = str(answers["collective"])
            if "codec" in answers:
                runtime.machine.commit_log.codec = str(answers["codec"])
            if "delay" in answers:
                expect_round(runtime.machine.commit_log.timings, float(plan["round_s"]))
        text = f"planned again: {_said(answers, current)}, because {why}"
        await self.services.stores.events.add(job.job, KIND, text)


def _current(job: Job, runtime: RoundRuntime) -> dict[str, Any]:
    """Return the values of the planned keys that hold now."""
    machine, strategy = runtime.machine, job.spec.strategy
    every = machine.commit_log.every or strategy.options.get("every")
    found = {"every": every, "collective": machine.collective or strategy.collective}
    return {key: value for key, value in found.items() if value}


def _said(answers: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Return the answers in words, beside what was."""
    said = []
    for key, value in answers.items():
        was = current.get(key)
        instead = f" instead of {was}" if was is not None else ""
        said.append(f"{key} stays {value}" if was == value else f"{key} {value}{instead}")
    return ", ".join(said)
