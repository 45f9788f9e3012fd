"""What programs of jobs may see of a machine whose owner has `sandbox = "on"`.

They read the system, Python and the folders that the owner lists, and write into their own folder.
They do not see the node's key, files of users or other jobs, and cannot signal other processes or
look into their memory. Unless the owner opens the network, they reach their hub and nothing else.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from atoll.config import JobSpec
from atoll.errors import NotAllowed
from atoll.net.proxies import hub_address
from atoll.node.launchers import hub_network, landlock
from atoll.node.launchers.hub_network import HubForwarder, HubNetwork
from atoll.node.launchers.launcher import Order, Sandbox

SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/opt", "/nix", "/snap", "/proc",
    "/sys", "/run/systemd/resolve", "/run/nvidia-persistenced",
)  # fmt: skip
"""Folders that programs read and run."""

DEVICES = "/dev"
"""Also shared memory, and accelerators."""

TEMPORARY = "tmp"
"""Folder for temporary files, in that of the process."""

_OPEN = 'or ask its owner for network = "open"'


def has_own_network() -> bool:
    """Return whether programs can have a network of their own here; tries it."""
    with tempfile.TemporaryDirectory(prefix="atoll-network-") as folder:
        return hub_network.is_possible(Path(folder))


def check_possible(spec: JobSpec, sandbox: Sandbox) -> None:
    """Raise NotAllowed if this system cannot restrict a job's processes, or it needs more."""
    if spec.job.requirements:  # pip may run code of packages, before there is any process
        raise NotAllowed(
            "this machine installs no packages for jobs, as its owner wants",
            given=f'requirements = {spec.job.requirements!r}, and sandbox = "on" in the policy',
            remedy="run it in a container that has them, or on another node ([job] on)",
        )
    if not landlock.version():
        raise NotAllowed(
            "this machine cannot keep programs apart, as its owner wants",
            given='sandbox = "on" in the policy',
            expected="Linux 5.13 or newer with Landlock",
            remedy='run containers there, or ask its owner for sandbox = "off"',
        )
    if sandbox.network == "hub":
        _check_network(spec)


def _check_network(spec: JobSpec) -> None:
    given = 'network = "hub" in the policy'
    if spec.job.route == "direct" or spec.island.machines > 1:
        raise NotAllowed(
            "programs on this machine reach their hub only, as its owner wants",
            given=f"{given}, and a job whose processes connect to each other",
            expected='route = "auto" or "relay" in [job], and islands on one machine',
            remedy=f"change the job, run it on other nodes, {_OPEN}",
        )
    if has_own_network():
        return
    if not landlock.keeps_ports():
        raise NotAllowed(
            "this machine cannot keep programs off its network, as its owner wants",
            given=given, expected="user namespaces, or Linux 6.7 or newer with Landlock",
            remedy=f"allow user namespaces there, run containers, {_OPEN}",
        )  # fmt: skip
    if spec.mesh.ranks > 1:
        raise NotAllowed(
            "this machine cannot keep an island off its network, as its owner wants",
            given=f"{given}, no user namespaces there, and {spec.mesh.ranks} ranks",
            expected="user namespaces: without them no process may open a port for the others",
            remedy=f"allow user namespaces there, run it on other nodes, {_OPEN}",
        )


def level(network: str = "hub") -> str:
    """Return in words what a sandbox keeps apart here, with this `network` in the policy."""
    if not landlock.version():
        return "not possible here: needs Linux 5.13 with Landlock; containers still isolate jobs"
    apart = "files and processes are kept apart"
    if not landlock.keeps_signals():
        apart = "files are kept apart, signals are not (before Linux 6.12)"
    if network == "open":
        return f"{apart}; any network, by the policy"
    if has_own_network():
        return f"{apart}; network: the hub only, in namespaces"
    if landlock.keeps_ports():
        return (
            f"{apart}; network: without user namespaces TCP to the hub's port only, but of any "
            "machine, and all UDP"
        )
    return (
        f"{apart}; the network cannot be: jobs are refused unless the policy has network = "
        '"open" (needs user namespaces, or Linux 6.7)'
    )


def temporary(order: Order) -> Path:
    """Return the folder for temporary files of a process; it is made."""
    folder = order.directory / TEMPORARY
    folder.mkdir(exist_ok=True)
    return folder


class Confinement:
    """Isolates the program of one order: the child calls `enter`, the agent everything else."""

    def __init__(self, order: Order, sandbox: Sandbox) -> None:
        """Prepare; blocks for a moment.

        Raises:
            OSError: the kernel refuses, or the hub's name cannot be resolved.
        """
        read, write = _paths_of(order, sandbox)
        self._network: HubNetwork | None = None
        port: int | None = None
        if sandbox.network == "hub":
            variables = order.variables
            target = hub_address(variables.get("ATOLL_PROXY") or variables["ATOLL_HUB"])
            if hub_network.is_possible(order.directory):
                needed = [path for path in (*read, *write) if str(path) not in SYSTEM]
                self._network = HubNetwork(
                    target.host, target.port, folder=order.directory, needed=needed
                )
            else:
                port = target.port
        try:
            self._rules = landlock.Landlock(readable=read, writable=write, connect_to=port)
        except BaseException:
            self._forget_network()
            raise

    def enter(self) -> None:
        """Restrict this process for ever; raises OSError if the kernel refuses."""
        if self._network is not None:
            self._network.enter()
        self._rules.restrict()

    def serve(self) -> HubForwarder | None:
        """Return the forwarder from the started program to its hub; None: it connects directly."""
        return self._network.serve() if self._network is not None else None

    def close(self) -> None:
        """Free its resources; a program that has entered stays confined."""
        self._rules.close()
        self._forget_network()

    def _forget_network(self) -> None:
        if self._network is not None:
            self._network.close()


def _packages(order: Order) -> list[str]:
    """Return the folders from which this agent imports, as its programs do.

    The working directory, which `python -m` adds, may be the owner's home: it is left out unless it
    contains Atoll. A parent of the process's folder is left out because it holds keys and jobs.
    """
    found = []
    for folder in (Path(path).resolve() for path in sys.path if path):
        above = order.directory.resolve().is_relative_to(folder)
        only_started_there = folder == Path.cwd() and not (folder / "atoll").is_dir()
        if not above and not only_started_there:
            found.append(str(folder))
    return found


def _paths_of(order: Order, sandbox: Sandbox) -> tuple[list[Path], list[Path]]:
    """Return what the program of an order reads, and what it writes, too."""
    own = order.python.parent.parent  # a venv; links in it lead to the base installation
    installed = [sys.prefix, sys.base_prefix, str(own), *_packages(order)]
    ca, shared = (order.variables.get(name) for name in ("ATOLL_CA", "ATOLL_PACE"))
    opened = [str(Path(path).expanduser()) for path in sandbox.readable]
    read = [*SYSTEM, *installed, *opened, *([ca] if ca else [])]
    write = [DEVICES, str(order.directory), str(order.folder), *([shared] if shared else [])]
    return [Path(path) for path in read], [Path(path) for path in write]
