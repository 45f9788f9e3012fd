"""Nodes on the machines of a Ray cluster: each is an actor, which Ray places and restarts.

    import ray
    from atoll.integrations.ray import Nodes

    ray.init("auto")
    with Nodes(ticket, count=8, gpus=1) as nodes:  # of `atoll ticket new --role node --uses 20`
        nodes.wait()                               # until all have ended; or do other things

Ray's actors: https://docs.ray.io/en/latest/ray-core/actors.html. Each machine of the cluster needs
Atoll (`runtime_env={"pip": ["atoll[train]"]}` in `ray.init` installs it). What nodes send goes to
the hub, not through Ray. An actor that Ray starts again joins as a new node.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from atoll.errors import ConfigError
from atoll.system import die_with_parent

try:
    import ray
except ImportError as error:
    raise ConfigError(
        "Ray is not installed", given=str(error), expected="the package ray",
        remedy="pip install ray",
    ) from error  # fmt: skip

LAST_LINES = 50
"""Lines of a node's output that its actor keeps."""
LEAVE_S = 60.0
"""Longest wait for a node to leave its round in order."""


class _Node:
    """An actor: a process of `atoll join`, which dies with it."""

    def __init__(self, ticket: str, name: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="atoll-node-")
        home = Path(self._folder.name)
        (home / "ticket").write_bytes(ticket.encode())  # in a folder of this user alone
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "atoll.cli", "join", f"@{home}/ticket",
             "--home", str(home / "node"), "--name", name],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            preexec_fn=die_with_parent(),
        )  # fmt: skip

    def wait(self) -> tuple[int, list[str]]:
        """Wait until the node has ended; return its exit status and its last lines.

        Its folder is deleted then: Ray kills actors, so nothing is deleted when they end.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line.rstrip("\n"))
        status = self._process.wait()
        self._folder.cleanup()
        return status, list(self._lines)

    def leave(self) -> None:
        """Let the node leave its round in order."""
        self._process.terminate()


class Nodes:
    """Nodes on the machines of a Ray cluster, until `close` or the end of a `with` block."""

    def __init__(
        self,
        ticket: str,
        *,
        count: int,
        cpus: float = 1.0,
        gpus: float = 0.0,
        resources: dict[str, float] | None = None,
        restarts: int = 3,
    ) -> None:
        """Ask Ray for `count` actors; those that do not fit yet start when they do.

        Args:
            ticket: Of the role `node`, for as many uses as there may be nodes, restarts included.
            count: Number of nodes.
            cpus: Cores that Ray sets aside for each.
            gpus: Accelerators for each; the node uses those.
            resources: Ray's own kinds of resources for each.
            restarts: How often Ray starts an actor again whose machine was lost; -1: always.

        Raises:
            ConfigError: there is no cluster, or a number is out of range.
        """
        if not ray.is_initialized():
            raise ConfigError(
                "there is no Ray cluster to start nodes on", given="ray is not initialized",
                expected='ray.init("auto") before, or ray.init() for this machine alone',
            )  # fmt: skip
        if count < 1:
            raise ConfigError(
                "a number of nodes is out of range", given=count, expected="1 or more"
            )
        actor = ray.remote(_Node).options(
            num_cpus=cpus, num_gpus=gpus, resources=resources, max_restarts=restarts,
            max_task_retries=-1,  # `wait` waits for an actor that starts again
            max_concurrency=2,  # `leave` comes while `wait` waits
        )  # fmt: skip
        self._actors: list[Any] = [actor.remote(ticket, f"ray-{slot}") for slot in range(count)]
        self._ends = [each.wait.remote() for each in self._actors]

    def wait(self, timeout_s: float | None = None) -> list[tuple[int, list[str]]]:
        """Wait until all nodes have ended; return the exit status and the last lines of each.

        Raises:
            ray.exceptions.GetTimeoutError: some still run after `timeout_s`.
            ray.exceptions.RayActorError: an actor was lost more often than it may restart.
        """
        found: list[tuple[int, list[str]]] = ray.get(self._ends, timeout=timeout_s)
        return found

    def close(self) -> None:
        """Let all nodes leave their rounds in order, and end their actors."""
        actors, self._actors = self._actors, []
        for actor in actors:
            actor.leave.remote()
        ray.wait(self._ends, num_returns=len(self._ends), timeout=LEAVE_S if actors else 0)
        for actor in actors:
            ray.kill(actor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
