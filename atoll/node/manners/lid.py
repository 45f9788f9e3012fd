"""Whether the lid is closed while no other screen is there."""

from __future__ import annotations

from pathlib import Path

from atoll.node.manners.commands import Commands
from atoll.node.manners.reading import Reading


class Lid:
    """Reads the kernel's button, or asks the login manager."""

    def __init__(self, *, root: Path = Path("/"), commands: Commands | None = None) -> None:
        """Look below `root`, ask through `commands`."""
        self._root = root
        self._commands = commands or Commands()

    def read(self) -> Reading:
        """Return whether the lid is closed; a docked machine's lid says nothing about its use."""
        closed = self._from_files()
        if closed is None:
            words = self._commands.logind("LidClosed")
            closed = words[0] == "true" if words else None
        if closed and self._commands.logind("Docked") == ["true"]:
            closed = False
        return Reading(lid_closed=closed)

    def _from_files(self) -> bool | None:
        states = []
        for path in sorted(self._root.glob("proc/acpi/button/lid/*/state")):
            try:
                states.append(path.read_text(encoding="utf-8", errors="replace"))
            except OSError:
                continue
        return any("closed" in state for state in states) if states else None
