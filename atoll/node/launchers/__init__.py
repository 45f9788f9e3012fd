"""Launchers: start the processes of a job, as plain processes or in containers.

May import node/processes and identity. Start reading at `launcher.py`, the interface.
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
    """Return the launchers that work on this machine; blocks while it asks the container daemon."""
    return ["process", "container"] if daemon_available() else ["process"]


class Launchers:
    """The launchers of one agent, by name."""

    def __init__(self, *, home: Path, node: str) -> None:
        self._containers = ContainerLauncher(home=home, node=node)
        self._table: dict[str, Launcher] = {
            "process": ProcessLauncher(),
            "container": self._containers,
        }

    def of(self, name: str) -> Launcher:
        """Return a launcher; raises ConfigError if the name is unknown."""
        if name not in self._table:
            raise unknown("launcher", name, self._table)
        return self._table[name]

    def clean(self) -> None:
        """Remove containers of earlier agents of this home; blocks. They outlive their agent."""
        if not daemon_available():
            return
        try:
            self._containers.remove_orphans()
        except AtollError as error:
            log.warning("containers that were left over may still run: %s", error)
