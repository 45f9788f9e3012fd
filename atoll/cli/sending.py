"""Sends a job to a hub: its folder of code as a pack, its files, its text; each once."""

from __future__ import annotations

import dataclasses

from atoll.cli.jobfile import PACKED, Submission
from atoll.net.api import HubClient


def send(client: HubClient, submission: Submission, *, batch: str = "") -> str:
    """Submit a job and return its id.

    Args:
        client: The hub.
        submission: The job.
        batch: Label of the jobs that are submitted with it.

    Raises:
        ConfigError: the job file is wrong, or its code cannot travel.
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
    """Submit jobs that belong together; return their ids in order. One alone is no batch."""
    label = batch if len(submissions) > 1 else ""
    return [send(client, submission, batch=label) for submission in submissions]
