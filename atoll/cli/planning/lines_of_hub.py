"""Lines between the nodes of a hub, measured by a job on them: `atoll plan fleet --lines`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from atoll import config
from atoll.errors import AtollError, JobError
from atoll.fleet.fleet import Link
from atoll.fleet.kept_links import kept_links
from atoll.wire.states import JobState, NodeState

if TYPE_CHECKING:
    from atoll.net.http.client import HubClient

START_S = 120.0
PER_PAIR_S = 6.0
"""Time per pair besides the transfers: that of a connection attempt without an answer."""
GRACE_S = 2.0

SCRIPT = """
import atoll
from atoll.config import worker_environment
from atoll.node.machine.lines import measure_all

here = worker_environment()
with atoll.join() as run:
    measure_all(run, wanted={count}, hub=here.hub, seconds={seconds}, folder=here.directory)
"""
SPEC = """
[job]
name = "lines"
script = "lines.py"
nodes = {count}
min_nodes = {count}
on = [{nodes}]
"""


def links_of(client: HubClient, *, seconds: float) -> list[Link]:
    """Return the links between all nodes that are online; pairs that do not connect have none.

    Pairs are measured one after another, each for slightly more than three times `seconds`.

    Raises:
        JobError: the job did not end in time, or failed.
    """
    online = [row for row in client.nodes() if row["state"] == NodeState.ONLINE]
    nodes = [str(row["node"]) for row in online if not row["draining"]]
    if len(nodes) < 2:
        return []
    names = ", ".join(json.dumps(node) for node in nodes)
    spec = SPEC.format(count=len(nodes), nodes=names)
    script = SCRIPT.format(count=len(nodes), seconds=seconds)
    job = client.submit(spec, files={"lines.py": script})
    pairs = len(nodes) * (len(nodes) - 1) / 2
    deadline = time.monotonic() + START_S + pairs * (3 * seconds + PER_PAIR_S)
    try:
        while not (view := client.job(job))["ended"]:
            if time.monotonic() > deadline:
                raise JobError(
                    "the lines between nodes were not measured in time", given=job,
                    remedy=f"atoll logs {job}",
                )  # fmt: skip
            time.sleep(0.3)
    except BaseException:
        client.stop(job, grace_s=GRACE_S)
        raise
    if view["state"] != JobState.DONE:
        raise JobError(
            "the lines between nodes could not be measured", given=f"{job}: {view['reason']}",
            remedy=f"atoll logs {job}",
        )  # fmt: skip
    node_of = {str(one["member"]): str(one["node"]) for one in view["members"]}
    return [link for member in node_of for link in _links_of_member(client, job, member, node_of)]


def links_between(hub: str, rows: Sequence[Mapping[str, Any]]) -> list[Link]:
    """Return the links last measured from here between the nodes of a hub that are online."""
    online = {str(row["node"]) for row in rows if row.get("state") == NodeState.ONLINE}
    return kept_links(config.home(), hub, online, now=time.time())


def _links_of_member(
    client: HubClient, job: str, member: str, node_of: dict[str, str]
) -> Iterator[Link]:
    """Yield what a member has measured, in both directions."""
    try:
        lines: list[dict[str, Any]] = json.loads(client.read_file(job, f"lines-{member}.json"))
    except AtollError:
        return
    for line in lines:
        here, there = node_of[member], node_of[line["to"]]
        if line["up_mbps"] and line["down_mbps"]:
            trip = line["latency_ms"]
            yield Link(between=[here, there], mbps=line["up_mbps"], latency_ms=trip)
            yield Link(between=[there, here], mbps=line["down_mbps"], latency_ms=trip)
