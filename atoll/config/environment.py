"""The only place that reads environment variables."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit

from atoll.config.rank_environment import SUPERVISED
from atoll.errors import ConfigError

VISIBLE_ACCELERATORS = "CUDA_VISIBLE_DEVICES"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerEnvironment:
    """What a node agent passes to a worker process in its environment."""

    hub: str
    """URL of the hub, http://HOST:PORT."""
    token: str
    job: str
    member: str
    directory: Path
    """Working folder of this process."""
    spec: Path
    """The job's TOML file."""
    ca: str = ""
    """PEM file of the hub's certificate authority; empty: none is pinned."""
    proxy: str = ""
    """URL of the proxy to the hub; empty: none."""
    upload_bps: float = 0.0
    """Limit in bits per second to the hub; 0: none."""
    download_bps: float = 0.0
    """Limit in bits per second from the hub; 0: none."""
    device: str = ""
    """The device to compute on, as job and owner agree; empty: the job's setting."""
    pace: str = ""
    """File through which all processes of a machine share one limit; empty: separate limits."""
    hub_only: bool = False
    """Whether the owner lets this process reach the hub only."""

    @property
    def relayed(self) -> bool:
        """Whether all traffic goes through the hub: by `hub_only`, or to limit the bandwidth."""
        return self.hub_only or bool(self.upload_bps or self.download_bps)


def read_worker_environment(environment: Mapping[str, str]) -> WorkerEnvironment | None:
    """Return what the node agent set; None if the process was started by hand."""
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
            device=environment.get("ATOLL_DEVICE", ""),
            pace=environment.get("ATOLL_PACE", ""),
            hub_only=environment.get("ATOLL_HUB_ONLY", "") == "1",
        )
    except (KeyError, ValueError) as error:
        raise ConfigError(
            "the environment of this worker is incomplete",
            given=f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error),
            remedy="start workers with `atoll run`, or unset ATOLL_JOB to run alone",
        ) from error


def worker_environment() -> WorkerEnvironment | None:
    """Return `read_worker_environment` of this process."""
    return read_worker_environment(os.environ)


def worker_variables(worker: WorkerEnvironment) -> dict[str, str]:
    """Return the environment variables of a worker, which `read_worker_environment` reads."""
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
        "ATOLL_DEVICE": worker.device,
        "ATOLL_PACE": worker.pace,
        "ATOLL_HUB_ONLY": "1" if worker.hub_only else "",
        SUPERVISED: "",  # this process is not a rank, even if its agent runs below one
        "PYTHONUNBUFFERED": "1",
    }


LARGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
"""Lets torch ask Linux for pages of 2 MB: the vectors of a round are mapped anew in every round,
which costs more than the arithmetic on them in pages of 4 kB (`python -m bench.round_parts`)."""


def child_environment(worker: WorkerEnvironment, *, threads: int) -> dict[str, str]:
    """Return this process's environment plus the worker's variables."""
    environment = extended_environment({**LARGE_PAGES, **worker_variables(worker)})
    if threads:
        environment.update(OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
    return environment


def extended_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with variables added or replaced."""
    return {**os.environ, **variables}


def visible_accelerators(found: int) -> list[str]:
    """Return the accelerators that this process may use: those of CUDA_VISIBLE_DEVICES, or all."""
    chosen = os.environ.get(VISIBLE_ACCELERATORS)
    if chosen is None:
        return [str(number) for number in range(found)]
    return [name for name in chosen.split(",") if name]


def container_hosts() -> list[str]:
    """Return possible addresses of a container daemon: DOCKER_HOST, or the usual sockets."""
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

    `https_proxy` or `http_proxy` by the URL's scheme, else `all_proxy`, in lower or upper case;
    `no_proxy` lists hosts, domains, addresses and networks to exclude. Loopback is always excluded.
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
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _is_exempt(host: str, port: int | None, listed: str) -> bool:
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
"""Lets RL environments render without a display, unless already set."""


TICKET_VARIABLE = "ATOLL_TICKET"
"""Passes the ticket to an agent, because command lines are visible to every user of a machine."""


def take_ticket() -> str:
    """Return the ticket from the environment and remove it, so that children do not inherit it."""
    return os.environ.pop(TICKET_VARIABLE, "")


def has_display() -> bool:
    """Return whether the user would see a browser that is started on this machine."""
    if os.environ.get("BROWSER"):
        return True
    if "SSH_CONNECTION" in os.environ:
        return False
    if sys.platform in ("win32", "darwin"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


CODE_VARIABLE = "ATOLL_CODE"


def take_code() -> str:
    """Return the pairing code from the environment and remove it, as `take_ticket` does."""
    return os.environ.pop(CODE_VARIABLE, "")


LEAST_STEP_VARIABLE = "ATOLL_LEAST_STEP_S"
"""Passes to the processes of one machine of a rehearsal how long its step lasts."""


def least_step_s() -> float:
    """Return the seconds that a step of the trainer takes at least; 0: it is not slowed down."""
    return max(0.0, float(os.environ.get(LEAST_STEP_VARIABLE) or 0.0))


def program_ticket() -> str:
    """Return the ticket of `atoll.connect`; empty: none is set."""
    return os.environ.get("ATOLL_TICKET", "")


def home() -> Path:
    """Return the folder of state that outlives a run: node identity, known hub."""
    if chosen := os.environ.get("ATOLL_HOME"):
        return Path(chosen)
    base = os.environ.get("XDG_STATE_HOME") or os.environ.get("LOCALAPPDATA")
    return Path(base) / "atoll" if base else Path.home() / ".local" / "state" / "atoll"


def set_home(folder: str) -> None:
    """Choose the folder of state, of this process and of those that it starts."""
    os.environ["ATOLL_HOME"] = folder


def cache() -> Path:
    """Return the folder of caches, which this user's agents on a machine share."""
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "atoll"
    except RuntimeError:  # a container's user without an entry: it has no home
        return home() / "cache"
