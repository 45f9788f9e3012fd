"""`atoll plan fleet`: the machines of a hub, or this one, as a file; may measure a job's step."""

from __future__ import annotations

import dataclasses
import math
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.markup import escape

from atoll import config
from atoll.cli import hub_access
from atoll.cli.planning.lines_of_hub import links_between, links_of
from atoll.cli.views import screen
from atoll.errors import AtollError, ConfigError
from atoll.fleet.fleet import Fleet, Machine
from atoll.fleet.kept_links import keep_links
from atoll.fleet.measured import failures_of_events, fleet_of_nodes
from atoll.fleet.reading import dump_fleet, unmeasured
from atoll.ids import safe_name
from atoll.wire.states import JobState, NodeState

if TYPE_CHECKING:
    from atoll.cli.jobs.jobfile import Submission
    from atoll.net.http.client import HubClient

START_S = 120.0
"""How long a probe's process may take to start on a node."""
GRACE_S = 2.0


def print_fleet(job: Path | None, *, hub: str, probe_s: float, lines_s: float, here: bool) -> None:
    """Print the file; missing figures are reported on standard error."""
    if probe_s and job is None:
        raise ConfigError(
            "a step can only be measured of a job", given=f"--probe {probe_s:g}",
            remedy="atoll plan fleet job.toml --probe 20",
        )  # fmt: skip
    fleet = (
        of_this_machine(job, probe_s=probe_s)
        if here
        else of_hub(hub, job, probe_s=probe_s, lines_s=lines_s)
    )
    typer.echo(dump_fleet(fleet))
    for what, names in unmeasured(fleet).items():
        screen.errors().print(f"[yellow]{what} of {', '.join(names)} is not known[/]")


def of_this_machine(job: Path | None, *, probe_s: float) -> Fleet:
    """Return a fleet of this machine: its speed and memory, and a step of the job."""
    from atoll.cli.jobs.jobfile import Overrides, read_target
    from atoll.forecast.keys import without_auto
    from atoll.forecast.probe import measure_step
    from atoll.node.machine.probe import Gpus, known_compute, node_info

    compute = known_compute(config.cache(), Gpus())
    info = node_info(config.home(), compute=compute)
    step_s = 0.0
    if job is not None and probe_s:
        spec = without_auto(read_target(job, Overrides()).spec)
        screen.errors().print(f"[dim]measuring a step of {spec.model.name} for {probe_s:g} s[/]")
        step_s = measure_step(spec, seconds=probe_s)
    machine = Machine(
        name=safe_name(platform.node()) or "here", step_s=step_s, gflops=info.matmul_gflops,
        memory_gb=round((info.gpu_memory_bytes or info.memory_bytes) / 1e9, 3),
    )  # fmt: skip
    return Fleet(machines=(machine,))


def of_hub(hub: str, job: Path | None, *, probe_s: float, lines_s: float = 0.0) -> Fleet:
    """Return the machines of a hub; with a job each of them computes it for `probe_s` seconds.

    With `lines_s` each transfer between two of them is measured for that many seconds.
    """
    known = hub_access.find(hub)
    with known.client(timeout_s=60.0) as client:
        steps = _probed(client, job, probe_s=probe_s) if job is not None and probe_s else {}
        if lines_s:
            screen.errors().print("[dim]measuring the lines between nodes, pair by pair[/]")
            measured = links_of(client, seconds=lines_s)
            keep_links(config.home(), known.url, measured, now=time.time())
        rows = client.nodes()
        links = links_between(known.url, rows)
        events = client.hub_events()["events"]
        failures = failures_of_events(events, now=time.time())
        return fleet_of_nodes(rows, step_s=steps, failures_per_day=failures, links=links)


def _probed(client: HubClient, job: Path, *, probe_s: float) -> dict[str, float]:
    """Return the seconds of a step on each node that is online, one after the other."""
    from atoll.cli.jobs.jobfile import Overrides, read_target

    found = {}
    for row in client.nodes():
        node = str(row["node"])
        if row["state"] != NodeState.ONLINE or row["draining"]:
            continue
        alone = Overrides(
            nodes=1, preset="alone", on=[node],
            settings=("train.steps=1000000", "checkpoint.every=1000000", "strategy.every=25"),
        )  # fmt: skip
        screen.errors().print(f"[dim]{node}: one step is measured for {probe_s:g} s[/]")
        try:
            found[node] = _step_on(client, read_target(job, alone), probe_s=probe_s)
        except AtollError as error:
            screen.errors().print(f"[yellow]{escape(f'{node}: {error}')}[/]")
    return found


def _step_on(client: HubClient, submission: Submission, *, probe_s: float) -> float:
    """Run the job on one node for `probe_s` after its first speed; return the seconds of a step.

    Raises:
        JobError: it failed, or did not start in time.
    """
    from atoll.errors import JobError

    spec = dataclasses.replace(
        submission.spec, job=dataclasses.replace(submission.spec.job, name="probe", min_nodes=0)
    )
    job = client.submit(config.dump_spec(spec), files=submission.files)
    rates: list[float] = []
    first = math.inf
    deadline, after = time.monotonic() + START_S, 0
    try:
        while time.monotonic() < (deadline if math.isinf(first) else first + probe_s):
            answer = client.metrics(job, after=after)
            after = answer["last"]
            rates += [float(r) for r in map(_rate, answer["points"]) if r]
            if rates and math.isinf(first):
                first = time.monotonic()
            if JobState(client.job(job)["state"]).ended:
                break
            time.sleep(0.5)
    finally:
        client.stop(job, grace_s=GRACE_S)
    if not rates:
        raise JobError("the probe reported no speed", given=job, remedy=f"atoll logs {job}")
    rates = rates[1:] or rates  # the first one has the start in it
    rate = sorted(rates)[len(rates) // 2]
    length = _tokens_of(spec)
    return length / rate


def _rate(point: dict[str, Any]) -> Any:
    return (point.get("values") or point).get("tokens_per_s")


def _tokens_of(spec: config.JobSpec) -> int:
    from atoll.forecast.keys import without_auto
    from atoll.forecast.workload import workload_of

    return workload_of(without_auto(spec)).tokens
