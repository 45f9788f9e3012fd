"""Service files for the hub or the agent: systemd units and launchd property lists."""

from __future__ import annotations

import os
import plistlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

SYSTEM_HOME = {
    "linux": PurePosixPath("/var/lib/atoll"),
    "macos": PurePosixPath("/usr/local/var/atoll"),
}
"""State folder of a system service."""

STOP_S = {"hub": 30, "node": 60}
"""Time to end: a node lets workers leave, then sends their artifacts."""

_SAID = {"hub": "Atoll hub", "node": "Atoll node"}

_GUARDED = """\
User={user}
StateDirectory=atoll
StateDirectoryMode=0700
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectControlGroups=yes
RestrictSUIDSGID=yes
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One service, independent of the system."""

    role: str
    """`hub` or `node`."""
    platform: str
    """`linux` or `macos`."""
    python: str
    """The interpreter that has Atoll."""
    home: PurePosixPath
    """Folder of its state."""
    arguments: Sequence[str] = ()
    """Arguments of `atoll hub` or `atoll join`."""
    user: str = ""
    """User of a system service; empty: a user service."""

    @property
    def label(self) -> str:
        """Its name in the system."""
        return f"atoll-{self.role}"

    @property
    def command(self) -> list[str]:
        """Return the whole command line."""
        start = [self.python, "-m", "atoll.cli"]
        if self.role == "node":
            return [*start, "join", f"--home={self.home}", *self.arguments]
        folders = [f"--data={self.home}/hub", f"--runs={self.home}/runs"]
        return [*start, "hub", *folders, *self.arguments]

    def place(self, *, person: Path) -> Path:
        """Return the path of its file.

        Args:
            person: Home folder of the user who owns the service.
        """
        if self.platform == "linux":
            folder = "/etc/systemd/system" if self.user else person / ".config/systemd/user"
            return Path(folder, f"{self.label}.service")
        folder = "/Library/LaunchDaemons" if self.user else person / "Library/LaunchAgents"
        return Path(folder, f"{self.label}.plist")

    def text(self) -> str:
        """Return the content of its file."""
        return _unit(self) if self.platform == "linux" else _property_list(self)

    def installing(self, place: Path) -> list[list[str]]:
        """Return the commands that start it, now and at boot."""
        if self.platform == "macos":
            return [["launchctl", "bootstrap", self._domain(), str(place)]]
        return [self._systemctl("daemon-reload"), self._systemctl("enable", "--now", self.label)]

    def removing(self) -> list[list[str]]:
        """Return the commands that stop it, before its file is deleted."""
        if self.platform == "macos":
            return [["launchctl", "bootout", f"{self._domain()}/{self.label}"]]
        return [self._systemctl("disable", "--now", self.label)]

    def removed(self) -> list[list[str]]:
        """Return the commands to run after its file was deleted."""
        return [] if self.platform == "macos" else [self._systemctl("daemon-reload")]

    def asking(self) -> list[str]:
        """Return the command that shows its status."""
        if self.platform == "macos":
            return ["launchctl", "print", f"{self._domain()}/{self.label}"]
        return self._systemctl("status", "--no-pager", self.label)

    def _systemctl(self, *words: str) -> list[str]:
        return ["systemctl", *([] if self.user else ["--user"]), *words]

    def _domain(self) -> str:
        return "system" if self.user else f"gui/{os.getuid() if hasattr(os, 'getuid') else 0}"


def _unit(service: Service) -> str:
    """Return a unit of systemd."""
    guarded = _GUARDED.format(user=service.user) if service.user else ""
    # Let systemd kill only the worker that runs out of memory: the agent reports it to the hub.
    memory = "OOMPolicy=continue\n" if service.role == "node" else ""
    return f"""\
[Unit]
Description={_SAID[service.role]}
Wants=network-online.target
After=network-online.target

[Service]
Type=exec
ExecStart={" ".join(_quoted(word) for word in service.command)}
Environment={_quoted(f"ATOLL_HOME={service.home}")} PYTHONUNBUFFERED=1
Restart=always
RestartSec=5
KillMode=mixed
TimeoutStopSec={STOP_S[service.role]}
LimitNOFILE=65536
{memory}{guarded}
[Install]
WantedBy={"multi-user.target" if service.user else "default.target"}
"""


def _quoted(word: str) -> str:
    """Return a word escaped for systemd: specifiers, variables and quotes have no effect."""
    word = word.replace("\\", "\\\\").replace("%", "%%").replace("$", "$$").replace('"', '\\"')
    return f'"{word}"' if any(letter in word for letter in " \t'\"\\;") else word


def _property_list(service: Service) -> str:
    """Return a property list of launchd."""
    logs = PurePosixPath(service.home) / f"{service.label}.log"
    content: dict[str, object] = {
        "Label": service.label,
        "ProgramArguments": service.command,
        "EnvironmentVariables": {"ATOLL_HOME": str(service.home), "PYTHONUNBUFFERED": "1"},
        "RunAtLoad": True,
        "KeepAlive": True,
        "ThrottleInterval": 5,
        "ExitTimeOut": STOP_S[service.role],
        "StandardOutPath": str(logs),
        "StandardErrorPath": str(logs),
        "SoftResourceLimits": {"NumberOfFiles": 65536},
    }
    if service.user:
        content["UserName"] = service.user
    return plistlib.dumps(content, sort_keys=False).decode()
