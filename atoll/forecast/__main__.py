"""`python -m atoll.forecast`: one plan for a hub, which itself never loads torch.

Reads `PlanRequest` as JSON from the standard input and writes JSON: figures of the ranking, or the
answers to a running job's keys, or `{"error": {...}}`, then with exit status 1.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from atoll import config
from atoll.errors import AtollError
from atoll.fleet.fleet import Link
from atoll.fleet.kept_links import kept_links
from atoll.fleet.measured import ONLINE, failures_of_events, fleet_of_nodes


class Running(msgspec.Struct, kw_only=True):
    """What a hub knows of a running job."""

    keys: list[str]
    current: dict[str, Any]
    """Their values, which may no longer be those of the job file."""
    step_s: dict[str, float]
    """Measured seconds of a step, by node."""
    links: list[dict[str, Any]] = []
    """Measured between the nodes: `between`, `mbps`, `latency_ms`."""


class PlanRequest(msgspec.Struct, kw_only=True):
    """The question of a hub."""

    spec: str
    """The job file."""
    nodes: list[dict[str, Any]]
    """The machines, as GET /api/nodes lists them."""
    events: list[dict[str, Any]] = []
    """Of the hub, as GET /api/events lists them."""
    hub: str = ""
    """Its URL, by which links measured from its machine are known."""
    law: str = ""
    """A file of `atoll scaling fit`, if there is one."""
    running: Running | None = None
    """The keys of a running job to answer for exactly these machines; None: rank what is possible.
    """


def answer_to(request: PlanRequest) -> dict[str, Any]:
    """Return the figures, or the answers.

    Raises:
        AtollError: nothing can be planned; says why.
    """
    from atoll.forecast.answer import answer_for, best_of_each, figures
    from atoll.forecast.automatic import answer_again
    from atoll.scaling.saved import read_fit

    now = time.time()
    spec = config.parse_spec(request.spec)
    online = [row for row in request.nodes if row.get("state") == ONLINE]
    here = {str(row["node"]) for row in online}
    running = request.running
    links = {link.ends: link for link in kept_links(config.home(), request.hub, here, now=now)}
    links |= {
        link.ends: link for link in (Link(**one) for one in (running.links if running else []))
    }
    fleet = fleet_of_nodes(
        request.nodes, step_s=running.step_s if running else {},
        failures_per_day=failures_of_events(request.events, now=now), links=list(links.values()),
    )  # fmt: skip
    if running is not None:
        return answer_again(spec, fleet, running.keys, current=running.current)
    fit = read_fit(Path(request.law)) if request.law else None
    found = answer_for(spec, fleet, fit=fit)
    return {
        **figures(found, best_of_each(found.ranking.forecasts)),
        "considered": len(found.ranking.forecasts), "law": bool(request.law),
        "fleet": [dataclasses.asdict(machine) for machine in fleet.machines],
    }  # fmt: skip


def main() -> int:
    """Answer one question; return the exit status."""
    try:
        request = msgspec.json.decode(sys.stdin.buffer.read(), type=PlanRequest)
        reply, status = answer_to(request), 0
    except AtollError as error:
        reply, status = {"error": error.to_dict()}, 1
    sys.stdout.buffer.write(msgspec.json.encode(reply))
    return status


if __name__ == "__main__":
    sys.exit(main())
