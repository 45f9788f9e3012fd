"""Runs candidates in a lab, and reads their seconds per step and their bytes from the members."""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.forecast.predict import Forecast
from atoll.netlab.lab import Lab
from bench.kit.cluster import ROOT
from bench.plan.labs import ELEMENTS, Drawn
from bench.slowlink import END_S, HUB, Site, lines_of

LONG_S = 5.0
"""A trial lasts about so long after its first period, and so many periods at least:"""
PERIODS = 3
JOINING_S = 120.0
MOST_FACTOR = 6.0
"""A job is cut when it takes so many times as long as predicted; what is done counts."""
DONE = -1
"""Number of the line after the last trial."""

ROUTES = """
import collections, json, sys
from atoll.cli.hub_access import find
with find().client() as client:
    (job,) = [j["job"] for j in client.jobs() if j["job"].startswith(sys.argv[1] + "-")]
    found = collections.Counter(
        f"{one['route']} of {len(one['members'])}" for one in client.rounds(job)["rounds"]
    )
    print(json.dumps(found))
"""

JOINED = """
import sys, time
from atoll.cli.hub_access import find
deadline = time.monotonic() + float(sys.argv[2])
with find().client() as client:
    while len(client.nodes()) < int(sys.argv[1]):
        if time.monotonic() > deadline:
            sys.exit("not all machines have joined")
        time.sleep(0.2)
"""

Trials = Sequence[tuple[int, Forecast]]


@dataclass(frozen=True)
class Seen:
    """What a trial showed."""

    step_s: float
    sent_bytes: float
    """Per step, mean of the members."""
    steps: int


@contextmanager
def site(drawn: Drawn) -> Iterator[Site]:
    """Start a hub and the machines of a lab."""
    with (
        tempfile.TemporaryDirectory(prefix="plan-", ignore_cleanup_errors=True) as folder,
        Lab(hosts=len(drawn.shapes)) as lab,
    ):
        for host, shape in enumerate(drawn.shapes):
            lab.shape(host, shape)
        made = Site(Path(folder), lab)
        try:
            made.gather(len(drawn.fleet))
            words = [str(len(drawn.fleet)), str(JOINING_S)]
            lab.run(
                HUB, [sys.executable, "-c", JOINED, *words], env=made.environment(HUB), check=True,
                timeout=2 * JOINING_S,
            )  # fmt: skip
            yield made
        finally:
            made.close()


def period_of(forecast: Forecast) -> int:
    """Return the steps of a period."""
    return int(forecast.candidate.options.get("every", 1))


def whole_periods(forecast: Forecast) -> tuple[int, int]:
    """Return the first steps that do not count, and all steps of a trial."""
    every = period_of(forecast)
    count = max(PERIODS, math.ceil(LONG_S / (forecast.step_s * every)))
    warm = 2 * every if every > 1 else 3  # the members' speeds are known after the first period
    return warm, warm + count * every + uncounted(forecast)


def uncounted(forecast: Forecast) -> int:
    """Return the last steps that do not count: a delayed method begins its last round earlier."""
    return period_of(forecast) if "delay" in forecast.candidate.options else 0


def run_trials(place: Site, drawn: Drawn, trials: Trials, *, name: str) -> dict[int, Seen]:
    """Run candidates with the same members and route in one job; those that were not done miss."""
    candidate = trials[0][1].candidate
    out = place.folder / name
    out.mkdir()
    plan = {
        "elements": ELEMENTS,
        "step_s": [0.0, *(machine.step_s for machine in drawn.fleet.machines)],
        "trials": [
            {
                "trial": number, "preset": one.candidate.preset, "codec": one.candidate.codec,
                "options": dict(one.candidate.options), "collective": one.candidate.collective,
                "steps": whole_periods(one)[1],
            }
            for number, one in trials
        ],
    }  # fmt: skip
    (out / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    (out / "member.py").write_text((ROOT / "bench/plan/member.py").read_text("utf-8"), "utf-8")
    members = ", ".join(f'"{name}"' for name in candidate.members)
    job = out / "job.toml"
    job.write_text(
        f'[job]\nname = "{name}"\nscript = "member.py"\nroute = "{candidate.route}"\n'
        f"nodes = {len(candidate.members)}\non = [{members}]\n"
        f'args = ["--plan", "{out / "plan.json"}", "--out", "{out}"]\n',
        encoding="utf-8",
    )
    running = place.start(HUB, "run", str(job))
    expected_s = sum(whole_periods(one)[1] * one.step_s + one.round_s for _, one in trials)
    deadline = time.monotonic() + JOINING_S + MOST_FACTOR * expected_s
    while running.poll() is None and time.monotonic() < deadline:
        found = lines_of(out)
        if len(found) == len(candidate.members) and all(
            lines[-1]["trial"] == DONE for lines in found.values()
        ):
            break
        time.sleep(0.2)
    if running.poll() is None:
        place.stop_jobs()
        running.wait(END_S)
    lines = lines_of(out)
    return {
        number: one
        for number, forecast in trials
        if (one := seen(lines, number, forecast)) is not None
    }


def routes_of(place: Site, name: str) -> dict[str, int]:
    """Return how many rounds of a job took which route with how many members, as far as kept."""
    command = [sys.executable, "-c", ROUTES, name]
    done = place.lab.run(
        HUB, command, env=place.environment(HUB), capture_output=True, text=True, timeout=END_S
    )
    if done.returncode:
        return {done.stderr.strip().splitlines()[-1]: 0}
    return dict(json.loads(done.stdout))


def seen(
    found: dict[str, list[dict[str, Any]]], number: int, forecast: Forecast
) -> Seen | None:  # fmt: skip
    """Return the figures of whole periods after the first ones.

    None: too few were done, or a member was lost, and the others went on without it.
    """
    every, (warm, _) = period_of(forecast), whole_periods(forecast)
    own = [
        {line["step"]: line for line in lines if line["trial"] == number}
        for lines in found.values()
    ]
    if not own or not all(own):
        return None
    last = min(max(lines) for lines in own) - uncounted(forecast)
    last = warm + (last - warm) // every * every
    if last <= warm or not all(step in lines for lines in own for step in (warm, last)):
        return None
    together = {
        line["contributors"]
        for lines in own
        for step, line in lines.items() if warm <= step <= last and line["contributors"]
    }  # fmt: skip
    if together != {len(forecast.candidate.members)}:
        return None
    spans = [(lines[last]["seconds"] - lines[warm]["seconds"]) / (last - warm) for lines in own]
    sent = [(lines[last]["sent"] - lines[warm]["sent"]) / (last - warm) for lines in own]
    return Seen(statistics.mean(spans), statistics.mean(sent), last - warm)
