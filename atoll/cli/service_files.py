"""Service files for the hub or the agent: units, property lists and tasks of Windows."""

from __future__ import annotations

import plistlib
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from xml.sax.saxutils import escape

from atoll import system

SYSTEM_HOME = {
    "linux": PurePosixPath("/var/lib/atoll"),
    "macos": PurePosixPath("/usr/local/var/atoll"),
    "windows": PurePosixPath("C:/ProgramData/Atoll"),
}
"""State folder of a system service."""

STOP_S = {"hub": 30, "node": 60}
"""Time to end: a node lets workers leave, then sends their artifacts."""

LOCAL_SERVICE = "S-1-5-19"
"""Windows: the account of system services, with the rights of an ordinary user."""

_MAY_READ = (LOCAL_SERVICE, "S-1-5-18", "S-1-5-32-544")
"""Windows: who may read the state of a system service; also the system and its administrators."""

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
    """`linux`, `macos` or `windows`."""
    python: str
    """The interpreter that has Atoll."""
    home: PurePosixPath
    """Folder of its state."""
    arguments: Sequence[str] = ()
    """Arguments of `atoll hub` or `atoll join`."""
    user: str = ""
    """User of a system service; empty: a user service."""
    account: str = ""
    """Windows: the account at whose logon a user service starts."""

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

    @property
    def encoding(self) -> str:
        """Encoding of its file: `schtasks` reads the one that it writes."""
        return "utf-16" if self.platform == "windows" else "utf-8"

    def place(self, *, person: Path) -> Path:
        """Return the path of its file.

        Args:
            person: Home folder of the user who owns the service.
        """
        if self.platform == "linux":
            folder = "/etc/systemd/system" if self.user else person / ".config/systemd/user"
            return Path(folder, f"{self.label}.service")
        if self.platform == "windows":  # the scheduler keeps a copy elsewhere
            return Path(self.home, f"{self.label}.xml")
        folder = "/Library/LaunchDaemons" if self.user else person / "Library/LaunchAgents"
        return Path(folder, f"{self.label}.plist")

    def text(self) -> str:
        """Return the content of its file."""
        return {"linux": _unit, "macos": _property_list, "windows": _task}[self.platform](self)

    def preparing(self) -> list[list[str]]:
        """Return the commands to run before anything is written into its folder of state."""
        if self.platform != "windows" or not self.user:
            return []
        allowed = [f"*{account}:(OI)(CI)F" for account in _MAY_READ]
        return [["icacls", str(self.home), "/inheritance:r", "/grant:r", *allowed]]

    def installing(self, place: Path) -> list[list[str]]:
        """Return the commands that start it, now and at boot."""
        if self.platform == "macos":
            return [["launchctl", "bootstrap", self._domain(), str(place)]]
        if self.platform == "windows":
            return [self._schtasks("Create", "/XML", str(place), "/F"), self._schtasks("Run")]
        return [self._systemctl("daemon-reload"), self._systemctl("enable", "--now", self.label)]

    def removing(self) -> list[list[str]]:
        """Return the commands that stop it, before its file is deleted."""
        if self.platform == "macos":
            return [["launchctl", "bootout", f"{self._domain()}/{self.label}"]]
        if self.platform == "windows":  # disabled first: it would be started again after its end
            words = (["Change", "/DISABLE"], ["End"], ["Delete", "/F"])
            return [self._schtasks(*some) for some in words]
        return [self._systemctl("disable", "--now", self.label)]

    def removed(self) -> list[list[str]]:
        """Return the commands to run after its file was deleted."""
        return [self._systemctl("daemon-reload")] if self.platform == "linux" else []

    def asking(self) -> list[str]:
        """Return the command that shows its status."""
        if self.platform == "macos":
            return ["launchctl", "print", f"{self._domain()}/{self.label}"]
        if self.platform == "windows":
            return self._schtasks("Query", "/V", "/FO", "LIST")
        return self._systemctl("status", "--no-pager", self.label)

    def _systemctl(self, *words: str) -> list[str]:
        return ["systemctl", *([] if self.user else ["--user"]), *words]

    def _schtasks(self, verb: str, *words: str) -> list[str]:
        return ["schtasks", f"/{verb}", "/TN", self.label, *words]

    def _domain(self) -> str:
        return "system" if self.user else f"gui/{(system.user_ids() or (0, 0))[0]}"


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
Environment={_quoted(f"ATOLL_HOME={service.home}", variables=False)} PYTHONUNBUFFERED=1
Restart=always
RestartSec=5
KillMode=mixed
TimeoutStopSec={STOP_S[service.role]}
LimitNOFILE=65536
{memory}{guarded}
[Install]
WantedBy={"multi-user.target" if service.user else "default.target"}
"""


def _quoted(word: str, *, variables: bool = True) -> str:
    """Return a word escaped for systemd: specifiers, variables and quotes have no effect.

    `variables`: systemd replaces variables here; in `Environment=` it takes `$` as it is.
    """
    word = word.replace("\\", "\\\\").replace("%", "%%").replace('"', '\\"')
    word = word.replace("$", "$$") if variables else word
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


def _task(service: Service) -> str:
    """Return a task of the Task Scheduler, schema 1.2.

    The scheduler restarts only what it could not start, and 255 times at most. Therefore the
    trigger is repeated every minute, which has no effect while the program runs (`IgnoreNew`).
    `pythonw` has no console window, and a task has neither environment variables nor a log, which
    `cli/logged.py` provides.
    """
    log = f"{service.home}/{service.label}.log"
    start = ["-m", "atoll.cli.logged", str(service.home), log]
    words = subprocess.list2cmdline([*start, *service.command[3:]])
    python = PureWindowsPath(service.python).with_name("pythonw.exe")
    if service.user:
        trigger, principal = "BootTrigger", f"<UserId>{LOCAL_SERVICE}</UserId>"
        account = ""
    else:
        trigger, principal = "LogonTrigger", "<LogonType>InteractiveToken</LogonType>"
        account = f"<UserId>{escape(service.account)}</UserId>"
    return f"""\
<?xml version="1.0" encoding="UTF-16"?>
<Task version="1.2" xmlns="http://schemas.microsoft.com/windows/2004/02/mit/task">
  <RegistrationInfo>
    <Description>{_SAID[service.role]}</Description>
  </RegistrationInfo>
  <Triggers>
    <{trigger}>
      <Repetition><Interval>PT1M</Interval></Repetition>
      <Enabled>true</Enabled>{account}
    </{trigger}>
  </Triggers>
  <Principals>
    <Principal id="Author">
      {principal}
      <RunLevel>LeastPrivilege</RunLevel>
    </Principal>
  </Principals>
  <Settings>
    <MultipleInstancesPolicy>IgnoreNew</MultipleInstancesPolicy>
    <DisallowStartIfOnBatteries>false</DisallowStartIfOnBatteries>
    <StopIfGoingOnBatteries>false</StopIfGoingOnBatteries>
    <IdleSettings>
      <StopOnIdleEnd>false</StopOnIdleEnd>
    </IdleSettings>
    <ExecutionTimeLimit>PT0S</ExecutionTimeLimit>
    <Priority>6</Priority>
    <RestartOnFailure>
      <Interval>PT1M</Interval>
      <Count>255</Count>
    </RestartOnFailure>
  </Settings>
  <Actions Context="Author">
    <Exec>
      <Command>{escape(str(python))}</Command>
      <Arguments>{escape(words)}</Arguments>
    </Exec>
  </Actions>
</Task>
"""
