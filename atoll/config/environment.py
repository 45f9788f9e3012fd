"""What the environment of a process says; it is read here and nowhere else."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from atoll.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerEnvironment:
    """What a node agent tells a worker process through its environment."""

    hub: str
    """URL of the hub, http://HOST:PORT."""
    token: str
    job: str
    member: str
    directory: Path
    """Own folder of this process on this machine."""
    spec: Path
    """The job's TOML file."""
    ca: str = ""
    """PEM file of the hub's certificate authority; empty: none is pinned."""
    proxy: str = ""
    """URL of the proxy to the hub; empty: none."""


def read_worker_environment(environment: Mapping[str, str]) -> WorkerEnvironment | None:
    """Return what the node agent set, or None when this process was started by hand."""
    if "ATOLL_JOB" not in environment:
        return None
    try:
        return WorkerEnvironment(
            hub=environment["ATOLL_HUB"],
            token=environment["ATOLL_TOKEN"],
            job=environment["ATOLL_JOB"],
            member=environment["ATOLL_MEMBER"],
            directory=Path(environment["ATOLL_DIRECTORY"]),
            spec=Path(environment["ATOLL_SPEC"]),
            ca=environment.get("ATOLL_CA", ""),
            proxy=environment.get("ATOLL_PROXY", ""),
        )
    except KeyError as error:
        raise ConfigError(
            "the environment of this worker is incomplete",
            given=f"{error.args[0]} is missing",
            remedy="start workers with `atoll run`, or unset ATOLL_JOB to run alone",
        ) from error


def worker_environment() -> WorkerEnvironment | None:
    """Return what the node agent told this process, or None."""
    return read_worker_environment(os.environ)


def worker_variables(worker: WorkerEnvironment) -> dict[str, str]:
    """Return the variables by which a worker is told what it needs to know."""
    return {
        "ATOLL_HUB": worker.hub,
        "ATOLL_TOKEN": worker.token,
        "ATOLL_JOB": worker.job,
        "ATOLL_MEMBER": worker.member,
        "ATOLL_DIRECTORY": str(worker.directory),
        "ATOLL_SPEC": str(worker.spec),
        "ATOLL_CA": worker.ca,
        "ATOLL_PROXY": worker.proxy,
        "PYTHONUNBUFFERED": "1",
    }


def child_environment(worker: WorkerEnvironment, *, threads: int) -> dict[str, str]:
    """Return this process's environment plus what a worker needs to know."""
    environment = {**os.environ, **worker_variables(worker)}
    if threads:
        environment.update(OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
    return environment


def container_hosts() -> list[str]:
    """Return where a daemon for containers may listen: DOCKER_HOST alone, or the usual sockets."""
    if os.environ.get("DOCKER_HOST"):
        return [os.environ["DOCKER_HOST"]]
    sockets = [Path("/var/run/docker.sock"), Path.home() / ".docker" / "run" / "docker.sock"]
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        sockets += [Path(runtime) / "docker.sock", Path(runtime) / "podman" / "podman.sock"]
    sockets.append(Path("/run/podman/podman.sock"))
    return [f"unix://{socket}" for socket in sockets if socket.exists()]


def home() -> Path:
    """Return the folder where Atoll keeps what outlives a run: node identity, known hub."""
    if "ATOLL_HOME" in os.environ:
        return Path(os.environ["ATOLL_HOME"])
    base = os.environ.get("XDG_STATE_HOME") or os.environ.get("LOCALAPPDATA")
    return Path(base) / "atoll" if base else Path.home() / ".local" / "state" / "atoll"
