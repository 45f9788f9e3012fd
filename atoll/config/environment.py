"""What the environment of a process says; it is read here and nowhere else."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit

from atoll.config.rank_environment import KEPT
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
    upload_bps: float = 0.0
    """Bits per second that this process may send to the hub; 0: no limit."""
    download_bps: float = 0.0
    """Bits per second that it may receive from the hub; 0: no limit."""
    pace: str = ""
    """File by which all processes of a machine keep to one limit; empty: each counts alone."""

    @property
    def capped(self) -> bool:
        """Whether its machine's owner limits its bandwidth: everything goes through the hub."""
        return bool(self.upload_bps or self.download_bps)


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
            upload_bps=float(environment.get("ATOLL_UPLOAD_BPS", "0")),
            download_bps=float(environment.get("ATOLL_DOWNLOAD_BPS", "0")),
            pace=environment.get("ATOLL_PACE", ""),
        )
    except (KeyError, ValueError) as error:
        raise ConfigError(
            "the environment of this worker is incomplete",
            given=f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error),
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
        "ATOLL_UPLOAD_BPS": str(worker.upload_bps),
        "ATOLL_DOWNLOAD_BPS": str(worker.download_bps),
        "ATOLL_PACE": worker.pace,
        KEPT: "",  # this process is no rank, even if its agent runs below one
        "PYTHONUNBUFFERED": "1",
    }


def child_environment(worker: WorkerEnvironment, *, threads: int) -> dict[str, str]:
    """Return this process's environment plus what a worker needs to know."""
    environment = extended_environment(worker_variables(worker))
    if threads:
        environment.update(OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
    return environment


def extended_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with variables added or replaced."""
    return {**os.environ, **variables}


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


def proxy_for(url: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the proxy that the environment names for a URL; empty: none.

    `https_proxy` or `http_proxy` by the URL's scheme, else `all_proxy`, in small or capital
    letters; `no_proxy` lists hosts, domains, addresses and networks that are reached directly.
    This machine itself always is.
    """
    parts = urlsplit(url)
    host = (parts.hostname or "").lower()
    if _is_loopback(host) or _is_exempt(host, parts.port, _either(environment, "no_proxy")):
        return ""
    named = _either(environment, f"{parts.scheme}_proxy") or _either(environment, "all_proxy")
    return named if "://" in named or not named else f"http://{named}"


def _either(environment: Mapping[str, str], name: str) -> str:
    return (environment.get(name) or environment.get(name.upper()) or "").strip()


def _is_loopback(host: str) -> bool:
    """Return whether a host is this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _is_exempt(host: str, port: int | None, listed: str) -> bool:
    """Return whether a `no_proxy` list covers a host."""
    for entry in (part.strip().lower() for part in listed.split(",")):
        if entry == "*" or entry in (host, f"{host}:{port}"):
            return True
        if "/" in entry:
            try:
                if ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False):
                    return True
            except ValueError:
                continue
        elif entry and host.endswith("." + entry.removeprefix("*").lstrip(".")):
            return True
    return False


NO_DISPLAY: Mapping[str, str] = MappingProxyType(
    {"SDL_VIDEODRIVER": "dummy", "SDL_AUDIODRIVER": "dummy", "PYGAME_HIDE_SUPPORT_PROMPT": "1"}
)
"""What lets environments draw on a machine without a display, unless its owner says otherwise."""


TICKET_VARIABLE = "ATOLL_TICKET"
"""Brings an agent its ticket: a command line is visible to every user of a machine."""


def take_ticket() -> str:
    """Return the ticket in the environment, and take it out: children need not know it."""
    return os.environ.pop(TICKET_VARIABLE, "")


def home() -> Path:
    """Return the folder where Atoll keeps what outlives a run: node identity, known hub."""
    if "ATOLL_HOME" in os.environ:
        return Path(os.environ["ATOLL_HOME"])
    base = os.environ.get("XDG_STATE_HOME") or os.environ.get("LOCALAPPDATA")
    return Path(base) / "atoll" if base else Path.home() / ".local" / "state" / "atoll"
