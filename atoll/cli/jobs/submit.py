"""Submit jobs to a hub: code pack, files and job file; also one copy per node."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec

from atoll.cli.jobs.jobfile import PACKED, Submission
from atoll.errors import PlanError
from atoll.hub.scheduler.resources import Capacity, mismatch, request_of
from atoll.ids import safe_name
from atoll.net.http.client import HubClient
from atoll.wire.messages import NodeInfo
from atoll.wire.states import NodeState


def send(client: HubClient, submission: Submission, *, batch: str = "") -> str:
    """Submit a job and return its id.

    Args:
        client: The hub.
        submission: The job.
        batch: Label of the jobs that are submitted with it.

    Raises:
        ConfigError: the job file is wrong, or its code cannot be packed.
    """
    if submission.code is None:
        return client.submit(submission.text, files=submission.files, batch=batch)
    from atoll.code import pack

    with pack(submission.code) as packed:
        sha256 = client.put_blob(packed.path)
    table = dataclasses.replace(submission.spec.job, code=PACKED + sha256)
    sent = dataclasses.replace(submission, spec=dataclasses.replace(submission.spec, job=table))
    return client.submit(sent.text, files=sent.files, batch=batch)


def send_batch(client: HubClient, submissions: list[Submission], *, batch: str) -> list[str]:
    """Submit jobs as a batch; return their ids in order. A single job gets no label."""
    label = batch if len(submissions) > 1 else ""
    return [send(client, submission, batch=label) for submission in submissions]


def one_per_node(
    submissions: Sequence[Submission], nodes: Sequence[dict[str, Any]]
) -> tuple[list[Submission], list[str]]:
    """Return a copy of each job for every node it fits on, and why other nodes have none.

    Args:
        submissions: The jobs.
        nodes: The hub's views of its nodes. Their current load is ignored: a copy may wait.

    Raises:
        PlanError: none of them fits on any node.
    """
    copies, skipped = [], []
    for submission in submissions:
        for view in nodes:
            why = mismatch(request_of(submission.spec), _place(view))
            if why:
                skipped.append(f"{submission.spec.job.name}: {why}")
            else:
                copies.append(_copy(submission, str(view["node"])))
    if not copies:
        raise PlanError(
            "no node can run this job",
            given="; ".join(skipped) or "no machine has joined",
            expected="at least one node that is online and fits [needs]",
            remedy="atoll status shows the nodes; on each machine: atoll join TICKET",
        )
    return copies, skipped


def _place(view: dict[str, Any]) -> Capacity:
    return Capacity(
        node=str(view["node"]),
        info=msgspec.convert(view["info"], NodeInfo),
        connected=view["state"] == NodeState.ONLINE,
        draining="it is asked to" if view.get("draining") else "",
        stats=view.get("stats") or {},
    )


def _copy(submission: Submission, node: str) -> Submission:
    spec = submission.spec
    name = f"{spec.job.name[:24]}-{safe_name(node)}"[:40].rstrip("-.")
    table = dataclasses.replace(spec.job, name=name, on=[node], nodes=1, min_nodes=0)
    return dataclasses.replace(submission, spec=dataclasses.replace(spec, job=table))
