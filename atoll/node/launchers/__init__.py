"""How a process of a job is started on this machine: as a child, or in a container."""

from __future__ import annotations

from pathlib import Path

from atoll.errors import unknown
from atoll.node.launchers.launcher import Launcher
from atoll.node.launchers.process import ProcessLauncher


class Launchers:
    """The launchers of one agent, by name; each is made when it is first asked for."""

    def __init__(self, *, home: Path, node: str) -> None:
        """Make none yet.

        Args:
            home: Folder of the agent.
            node: Id of this machine.
        """
        self._home = home
        self._node = node
        self._made: dict[str, Launcher] = {"process": ProcessLauncher()}

    def of(self, name: str) -> Launcher:
        """Return a launcher.

        Raises:
            ConfigError: there is none of that name.
        """
        if name not in self._made:
            raise unknown("launcher", name, self._made)
        return self._made[name]
