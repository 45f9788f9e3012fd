"""Whether the network is paid by volume, as NetworkManager has been told or guesses."""

from __future__ import annotations

from atoll.node.manners.commands import Commands
from atoll.node.manners.reading import Reading

_YES, _NO = ("1", "3"), ("2", "4")
"""What NetworkManager's property says: yes and guessed yes, no and guessed no."""


class Metered:
    """Asks NetworkManager; other systems tell nothing."""

    def __init__(self, commands: Commands | None = None) -> None:
        """Ask through these commands."""
        self._commands = commands or Commands()

    def read(self) -> Reading:
        """Return whether the network is metered."""
        answer = self._commands.ask(
            "busctl", "--system", "get-property", "org.freedesktop.NetworkManager",
            "/org/freedesktop/NetworkManager", "org.freedesktop.NetworkManager", "Metered",
        ).split()  # fmt: skip
        if answer and answer[-1] in (*_YES, *_NO):
            return Reading(metered=answer[-1] in _YES)
        shown = self._commands.ask("nmcli", "-t", "-f", "GENERAL.METERED", "device", "show")
        said = [line.partition(":")[2].strip() for line in shown.splitlines() if ":" in line]
        if any(word.startswith("yes") for word in said):
            return Reading(metered=True)
        return Reading(metered=False) if any(word.startswith("no") for word in said) else Reading()
