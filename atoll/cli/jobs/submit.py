"""Submit jobs to a hub: code pack, files and job file; also one copy per node."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from atoll.cli.jobs.jobfile import PACKED, Submission
from atoll.cli.jobs.names import did_you_mean, listed
from atoll.config import TuneTable
from atoll.config.redaction import secrets_here, secrets_of
from atoll.errors import ConfigError, PlanError
from atoll.hub.scheduler.resources import Capacity, answers_to, mismatch, request_of
from atoll.ids import by_number, safe_name
from atoll.model_hub import find_here
from atoll.net.http.client import HubClient
from atoll.wire.messages import NodeInfo
from atoll.wire.states import NodeState

ROUTER_FILES = ("router.safetensors", "features.safetensors")
"""Files that route texts to the paths of a job; beside its assignment STEM.safetensors they are
STEM.NAME."""


def send(client: HubClient, submission: Submission, *, batch: str = "") -> str:
    """Submit a job and return its id.

    Args:
        client: The hub.
        submission: The job.
        batch: Label of the jobs that are submitted with it.

    Raises:
        ConfigError: the job file is wrong, its code cannot be packed, or a file is missing.
    """
    spec = submission.spec
    if submission.code is not None:
        from atoll.code import pack

        with pack(submission.code) as packed:
            sha256 = client.put_blob(packed.path)
        spec = dataclasses.replace(spec, job=dataclasses.replace(spec.job, code=PACKED + sha256))
    reference = spec.dipaco.assignment
    assignment = Path(reference) if reference and not reference.startswith(PACKED) else None
    if assignment is not None:
        sha256 = _send_assignment(client, assignment)
        table = dataclasses.replace(spec.dipaco, assignment=PACKED + sha256)
        spec = dataclasses.replace(spec, dipaco=table)
    if spec.tune.send:
        spec = dataclasses.replace(spec, tune=_with_sent_examples(client, spec.tune))
    sent = dataclasses.replace(submission, spec=spec)
    job = client.submit(sent.text, files=sent.files, batch=batch)
    if assignment is not None:
        for name in ROUTER_FILES:
            file = assignment.with_name(f"{assignment.stem}.{name}")
            if file.is_file():
                client.put_file(job, name, file)
    return job


def _send_assignment(client: HubClient, file: Path) -> str:
    """Send the file that assigns documents to paths; return its hash."""
    if not file.is_file():
        raise ConfigError(
            "the documents of this job are not assigned to paths",
            given=f"assignment = {str(file)!r} in [dipaco], which is no file here",
            expected="a file of `atoll paths shard`, its path from the current folder on",
            remedy="atoll paths shard JOB --modules 2,2 --out FILE",
        )
    return client.put_blob(file)


def _with_sent_examples(client: HubClient, tune: TuneTable) -> TuneTable:
    """Send the files of examples that are here; a file is one entry then, with its weight."""
    data, weights = list[str](), list[float]()
    for number, pattern in enumerate(tune.data):
        files = find_here(pattern)
        entries = [f"{PACKED}{client.put_blob(file)}:{file.name}" for file in files] or [pattern]
        data += entries
        weights += [tune.weights[number]] * len(entries) if tune.weights else []
    return dataclasses.replace(tune, data=data, weights=weights)


def find_secrets(submissions: Sequence[Submission]) -> dict[str, str]:
    """Return the secrets of jobs from this command's environment, for a hub of its own.

    Raises:
        ConfigError: there is no such variable.
    """
    wanted = [name for submission in submissions for name in secrets_of(submission.spec)]
    found: dict[str, str] = {}
    for name, value in secrets_here(wanted).items():
        if value is None:
            raise ConfigError(
                f"the job wants the secret {name}",
                given="no such environment variable",
                remedy=f"export {name}=... before; on a hub: atoll secret set {name}",
            )
        found[name] = value
    return found


def check_nodes(submissions: Sequence[Submission], nodes: Sequence[dict[str, Any]]) -> None:
    """Refuse a job that may run only on machines that the hub does not know.

    Raises:
        ConfigError: names the machine, those that there are, and the likely one.
    """
    known = sorted((str(view["node"]) for view in nodes), key=by_number)
    for submission in submissions:
        for name in submission.spec.job.on:
            if not any(answers_to(node, name) for node in known):
                raise ConfigError(
                    "no machine of this name has joined the hub",
                    given=f"{name!r} (--on, or `on` in [job])",
                    expected=listed(known) if known else "a machine that has joined; none has",
                    remedy=did_you_mean(name, known) or "`atoll status` shows the machines",
                )


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
            why = mismatch(request_of(submission.spec), place_of(view))
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


def place_of(view: dict[str, Any]) -> Capacity:
    """Return a node's resources from the hub's view of it."""
    return Capacity(
        node=str(view["node"]),
        info=msgspec.convert(view["info"], NodeInfo),
        connected=view["state"] == NodeState.ONLINE,
        draining="its owner asked for it" if view.get("draining") else "",
        stats=view.get("stats") or {},
    )


def _copy(submission: Submission, node: str) -> Submission:
    spec = submission.spec
    name = f"{spec.job.name[:24]}-{safe_name(node)}"[:40].rstrip("-.")
    table = dataclasses.replace(spec.job, name=name, on=[node], nodes=1, min_nodes=0)
    return dataclasses.replace(submission, spec=dataclasses.replace(spec, job=table))
