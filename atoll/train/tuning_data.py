"""The examples of a fine-tuning job that came with it, fetched from the hub once per machine."""

from __future__ import annotations

import dataclasses
import glob

from atoll.config import JobSpec, WorkerEnvironment, cache
from atoll.config.tune_tables import SENT
from atoll.net.endpoint import endpoint_of
from atoll.net.http.client import HubClient


def with_examples(spec: JobSpec, environment: WorkerEnvironment) -> JobSpec:
    """Return the job with the files that were sent with it at a place on this machine.

    Files are kept in the cache of this user, named by their hash.

    Raises:
        HubError: the hub does not have one.
    """
    data = []
    for entry in spec.tune.data:
        found = SENT.fullmatch(entry)
        if found is None:
            data.append(entry)
            continue
        folder = cache() / "examples" / found[1]
        file = folder / found[2]
        if not file.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            with HubClient(
                environment.hub, environment.token, endpoint=endpoint_of(environment)
            ) as client:
                client.get_blob(found[1], file)
        data.append(glob.escape(str(file)))
    return dataclasses.replace(spec, tune=dataclasses.replace(spec.tune, data=data))
