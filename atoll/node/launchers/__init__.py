"""Node, launchers: start the processes of a job, as plain processes or in containers.

It may import node/processes and identity.
Start reading at `launcher.py`, the interface.
"""

from __future__ import annotations

import logging
from pathlib import Path

from atoll.errors import AtollError, unknown
from atoll.node.launchers.container import ContainerLauncher
from atoll.node.launchers.container_daemon import daemon_available
from atoll.node.launchers.launcher import Launcher
from atoll.node.launchers.process import ProcessLauncher

log = logging.getLogger(__name__)


def available() -> list[str]:
    """Return the launchers that work on this machine; asks the daemon for containers: blocks."""
    return ["process", "container"] if daemon_available() else ["process"]


class Launchers:
    """The launchers of one agent, by name."""

    def __init__(self, *, home: Path, node: str) -> None:
        """Ask no daemon yet.

        Args:
            home: Folder of the agent.
            node: Id of this machine.
        """
        self._containers = ContainerLauncher(home=home, node=node)
        self._table: dict[str, Launcher] = {
            "process": ProcessLauncher(),
            "container": self._containers,
        }

    def of(self, name: str) -> Launcher:
        """Return a launcher.

        Raises:
            ConfigError: there is none of that name.
        """
        if name not in self._table:
            raise unknown("launcher", name, self._table)
        return self._table[name]

    def clean(self) -> None:
        """Remove what earlier agents of this home left; blocks. Children die with their agent."""
        if not daemon_available():
            return
        try:
            self._containers.remove_orphans()
        except AtollError as error:
            log.warning("containers that were left over may still run: %s", error)
