"""Options of a container: program, user, folders, network and limits. Does not call the daemon.

Every container has no capabilities, no new privileges through set-uid programs, a limit on
processes, a bounded log at the daemon, and the process's folder at the same path as outside.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from atoll import system
from atoll.errors import ConfigError
from atoll.node.launchers.launcher import OOM_SCORE, Order

PYTHON_LABEL = "atoll.python"
"""Label of images that contain Atoll: the path of its Python."""

NOBODY = 65534
"""User and group inside, if the agent is root and the image names no user."""

MAX_PROCESSES = 4096
"""More than any training needs, and few enough to protect the machine."""

SHARED_MEMORY_BYTES = 2**30
"""Size of /dev/shm, which data loaders use; its content counts as the container's memory."""

DEFAULT_SHARES = 1024
NICE_STEP = 1.25
"""Factor by which one step of niceness lowers a process's weight in the kernel's scheduler."""


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """Properties of an image."""

    user: str = ""
    python: str = ""
    """Path of the Python with Atoll, if the image has one."""
    stop_signal: str = "SIGTERM"


def image_facts(attributes: Mapping[str, Any]) -> ImageFacts:
    """Parse an image's attributes from the daemon."""
    config = attributes.get("Config") or {}
    labels = config.get("Labels") or {}
    return ImageFacts(
        user=config.get("User") or "",
        python=labels.get(PYTHON_LABEL, ""),
        stop_signal=config.get("StopSignal") or "SIGTERM",
    )


def container_options(
    order: Order, image: ImageFacts, *, user: str, labels: Mapping[str, str]
) -> dict[str, Any]:
    """Return the arguments with which the daemon's client creates a container.

    `user` is the result of `container_user`; `labels` are for finding the container again. Raises
    ConfigError if its network does not reach the hub.
    """
    launch, caps = order.spec.launch, order.caps
    _check_network(launch.network, order.variables["ATOLL_HUB"])
    options: dict[str, Any] = {
        "image": launch.image,
        "name": f"atoll-{labels['atoll.job']}-{labels['atoll.member']}-{labels['atoll.attempt']}"
        f"-{os.urandom(3).hex()}",
        "labels": dict(labels),
        "environment": _environment(order, user),
        "working_dir": str(order.folder),
        "mounts": _mounts(order),
        "network_mode": launch.network,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "pids_limit": MAX_PROCESSES,
        "oom_score_adj": OOM_SCORE,
        "read_only": launch.read_only,
        "log_config": {"Type": "json-file", "Config": {"max-size": "10m", "max-file": "2"}},
        "shm_size": SHARED_MEMORY_BYTES,
        **_program(order, image),
    }
    if user:
        options["user"] = user
    if launch.read_only:
        options["tmpfs"] = {"/tmp": ""}
    if caps.memory_bytes:
        options["mem_limit"] = options["memswap_limit"] = caps.memory_bytes
    if caps.cores:
        cores = min(caps.cores, len(caps.cpus) or caps.cores)
        options["nano_cpus"] = round(cores * 1e9)
        options["cpuset_cpus"] = ",".join(str(cpu) for cpu in caps.cpus)
    if caps.nice:
        options["cpu_shares"] = max(2, round(DEFAULT_SHARES / NICE_STEP**caps.nice))
    if order.spec.needs.gpu and caps.gpus != ():
        options["device_requests"] = [_accelerators(caps.gpus)]
    return options


def container_user(image: ImageFacts, *, rootless: bool) -> str:
    """Return the user of a program inside its container; empty: the image's user.

    If the image names none it is the agent's user, so that its files belong to the owner, and never
    the machine's root. Root inside a rootless daemon is already the owner.
    """
    own = system.user_ids()
    if image.user or rootless or own is None:
        return ""
    if own[0] == 0:
        return f"{NOBODY}:{NOBODY}"
    return f"{own[0]}:{own[1]}"


def make_writable(directory: Path, *, user: str) -> None:
    """Let the user of a container write in its folder and to the files there.

    If the owner cannot be changed, all users may write; therefore the parent folder is closed to
    other users of this machine. `user` is e.g. `65534:65534`, or a name from the image.
    """
    own = system.user_ids()
    if own is None:
        return  # the daemon runs in a virtual machine and ignores owners
    jobs = directory.parents[1]
    jobs.chmod(0o700)
    uid, _, gid = user.partition(":")
    owned = uid.isdigit() and own[0] == 0
    if uid.isdigit() and int(uid) == own[0]:
        return
    for root, folders, files in os.walk(directory):
        for path in [Path(root), *(Path(root, name) for name in [*folders, *files])]:
            if owned:
                os.chown(path, int(uid), int(gid) if gid.isdigit() else -1, follow_symlinks=False)
            elif not path.is_symlink():
                path.chmod(path.stat().st_mode | (0o777 if path.is_dir() else 0o666))


def _check_network(network: str, hub: str) -> None:
    """Reject a separate network if the hub listens on this machine's loopback only."""
    if network != "bridge" or not _is_loopback(urlsplit(hub).hostname or ""):
        return
    raise ConfigError(
        "a container with its own network cannot reach this hub",
        given=f"network = {network!r} in [launch], and the hub is at {hub}",
        expected="a hub that listens on an address of its machine, or the machine's own network",
        remedy='set network = "host" in [launch], or start the hub with --host ADDRESS',
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _environment(order: Order, user: str) -> dict[str, str]:
    """Return the container's environment; users unknown to the image need a home."""
    home = {"HOME": str(order.directory), "USER": "atoll", "LOGNAME": "atoll"} if user else {}
    return {**home, **order.environment}


def _mounts(order: Order) -> list[dict[str, Any]]:
    own = str(order.directory)
    mounts = [_bind(own, own)]
    authority = order.variables.get("ATOLL_CA", "")
    if authority:
        mounts.append(_bind(authority, authority, read_only=True))
    return mounts + [
        _bind(str(mount.source), mount.target, read_only=mount.read_only) for mount in order.mounts
    ]


def _bind(source: str, target: str, *, read_only: bool = False) -> dict[str, Any]:
    return {"Type": "bind", "Source": source, "Target": target, "ReadOnly": read_only}


def _program(order: Order, image: ImageFacts) -> dict[str, Any]:
    """Return the program: the job's command, else Atoll's worker, else the image's own."""
    job = order.spec.job
    if job.command:
        return {"entrypoint": job.command[:1], "command": [*job.command[1:], *job.args]}
    if image.python:
        return {"entrypoint": [image.python], "command": ["-P", "-m", "atoll.node.worker"]}
    if job.script:
        raise ConfigError(
            "the image cannot run a script of Python that joins a job",
            given=order.spec.launch.image,
            expected=f"an image with Atoll, labelled {PYTHON_LABEL}=PATH of its Python",
            remedy="build one from deploy/, or set [job] command",
        )
    return {"command": list(job.args)} if job.args else {}


def _accelerators(gpus: tuple[int, ...] | None) -> dict[str, Any]:
    request: dict[str, Any] = {"Driver": "", "Capabilities": [["gpu"]], "Options": {}}
    if gpus is None:
        return {**request, "Count": -1}
    return {**request, "DeviceIDs": [str(gpu) for gpu in gpus]}
