"""How long nobody has touched the machine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from atoll.clock import Clock, RealClock
from atoll.node.manners.commands import Commands
from atoll.node.manners.reading import Reading

_HID_IDLE = re.compile(r'"HIDIdleTime"\s*=\s*(\d+)')

DEVICES = ("dev/pts/[0-9]*", "dev/tty[0-9]*", "dev/input/event*", "dev/input/mouse*")
"""Files whose time of last access is that of a key or a mouse."""


class Activity:
    """Asks whatever knows; the latest touch that anything has seen counts."""

    def __init__(
        self,
        *,
        root: Path = Path("/"),
        commands: Commands | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Look below `root`, ask through `commands`."""
        self._root = root
        self._commands = commands or Commands()
        self._clock = clock or RealClock()

    def read(self) -> Reading:
        """Return the seconds since the last touch."""
        idle = [seconds for seconds in self._sources() if seconds is not None]
        return Reading(idle_s=max(0.0, min(idle))) if idle else Reading()

    def _sources(self) -> Iterator[float | None]:
        screen = self._from_screen()
        yield screen
        if screen is None:  # what the desktop tells of itself is coarser
            yield self._from_login_manager()
        yield self._from_mac()
        yield self._from_devices()

    def _from_screen(self) -> float | None:
        """Return what the X server says, in milliseconds."""
        answer = self._commands.ask("xprintidle").strip()
        return int(answer) / 1000 if answer.isdigit() else None

    def _from_login_manager(self) -> float | None:
        """Return what desktops have told the login manager; some never tell it anything."""
        words = self._commands.logind("IdleHint", "IdleSinceHint")
        if len(words) != 2 or not words[1].isdigit() or int(words[1]) == 0:
            return None
        if words[0] != "true":
            return 0.0
        return self._clock.wall() - int(words[1]) / 1e6

    def _from_mac(self) -> float | None:
        """Return what macOS says, in nanoseconds."""
        found = _HID_IDLE.search(self._commands.ask("ioreg", "-c", "IOHIDSystem", "-d", "4"))
        return int(found[1]) / 1e9 if found else None

    def _from_devices(self) -> float | None:
        """Return the time since terminals and input devices were last read."""
        touched = []
        for pattern in DEVICES:
            for path in self._root.glob(pattern):
                try:
                    touched.append(path.stat().st_atime)
                except OSError:
                    continue
        return self._clock.wall() - max(touched) if touched else None
